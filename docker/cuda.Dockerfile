# rlft_fast on NVIDIA GPUs:
#
#     docker build --file docker/cuda.Dockerfile --tag rlft_fast:cuda .
#     docker run --rm --gpus all --ipc host --user "$(id -u):$(id -g)" --volume "$PWD:/work" --workdir /work \
#       rlft_fast:cuda train run.yaml
#
# Packages have the versions of constraints.txt, with which the tests ran. --build-arg RLFT_FAST_CUDA_ARCHS=90a compiles
# for one kind of GPU, in a quarter of the time. --build-arg TORCH=vllm --build-arg CONSTRAINTS=/dev/null installs vLLM,
# and the torch and other packages that vLLM asks for.
FROM nvidia/cuda:13.0.0-devel-ubuntu24.04 AS build
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
ARG EXTRAS=train,lora,math,log,ray,servers
ARG CONSTRAINTS=/constraints.txt
ARG RLFT_FAST_CUDA_ARCHS
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/rlft_fast
ENV PATH=/opt/rlft_fast/bin:$PATH
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" "$TORCH"
COPY constraints.txt /constraints.txt
ENV PIP_CONSTRAINT=$CONSTRAINTS
RUN pip install --no-cache-dir "setuptools>=77" ninja pybind11
COPY . /rlft_fast
RUN pip install --no-cache-dir --no-build-isolation "/rlft_fast[$EXTRAS]"

FROM nvidia/cuda:13.0.0-base-ubuntu24.04
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/rlft_fast /opt/rlft_fast
ENV PATH=/opt/rlft_fast/bin:$PATH
# Not root. Any --user may write to the home, and torch asks for the user's name.
RUN useradd --create-home rlft_fast && chmod 1777 /home/rlft_fast
ENV HOME=/home/rlft_fast USER=rlft_fast
USER rlft_fast
ENTRYPOINT ["rlft-fast"]
CMD ["doctor"]
