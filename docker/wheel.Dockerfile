# The wheels of a release on one machine, in the container of .github/workflows/release.yml, whose glibc is 2.28:
#
#     docker build --file docker/wheel.Dockerfile --output dist .
#
# rlft_fast-cuda, one wheel for all Pythons:
#
#     docker build --file docker/wheel.Dockerfile --output dist --build-arg RLFT_FAST_CUDA_ONLY=1 \
#       --build-arg IMAGE=pytorch/manylinux2_28-builder:cuda13.0 --build-arg PYTHONS=/opt/python/cp311-cp311/bin/python .
ARG IMAGE=quay.io/pypa/manylinux_2_28_x86_64
FROM ${IMAGE} AS build
ARG PYTHONS="/opt/python/cp311-cp311/bin/python /opt/python/cp312-cp312/bin/python /opt/python/cp313-cp313/bin/python"
ARG TORCH=torch==2.11.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG RLFT_FAST_CUDA_ONLY
ARG RLFT_FAST_REPOSITORY
WORKDIR /rlft_fast
COPY . .
RUN make wheels

FROM scratch
COPY --from=build /rlft_fast/dist /
