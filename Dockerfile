# powertrain in a container, for NVIDIA GPUs and for CPUs:
#
#   docker build --tag powertrain .
#   docker run --rm --gpus all --volume "$PWD:/work" powertrain train data=mine.txt
#
# torch's usual build for Linux has CUDA's libraries with it and runs on CPUs too, so that no CUDA image is needed; the driver
# is the host's, by way of NVIDIA's container toolkit. For CPUs alone, or for another CUDA version, add the options that the page
# "Get started" of pytorch.org gives for it; the CPU build takes several GB less:
#
#   docker build --tag powertrain:cpu --build-arg TORCH_OPTIONS="--index-url ADDRESS" .
FROM python:3.12-slim

ARG TORCH_OPTIONS=""
ARG EXTRAS=tables,bridge,qlora,gguf

# g++ compiles the kernels of torch's compiler and Triton, at run time
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install --no-cache-dir $TORCH_OPTIONS "$(grep '^torch==' constraints.txt)"
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]"

RUN useradd --create-home --uid 1000 user && mkdir /work && chown user /work
USER user
WORKDIR /work
ENTRYPOINT ["powertrain"]
CMD ["--help"]
