# The environment of the tested releases, with the recipes: docs/install.md says how to build and run it.
#   docker build -t fairseq_deep .                                   torch of the package index: with CUDA, for GPUs
#   docker build -t fairseq_deep --build-arg TORCH_INDEX=URL .       torch from there, such as PyTorch's index for CPUs
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm

# g++ builds fairseq, and torch.compile calls it (--compile)
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH FAIRSEQ_DEEP_ENV=current PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/venv
WORKDIR /opt/fairseq_deep

ARG TORCH_INDEX
COPY constraints.txt ./
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch -c constraints.txt

COPY third_party third_party
RUN pip install ./third_party/fairseq -c constraints.txt

COPY . .
RUN pip install -e '.[train,plot]' -c constraints.txt && fairseq-deep doctor

RUN useradd --create-home --uid 1000 user && mkdir /data && chown user /data
USER 1000
WORKDIR /data
CMD ["fairseq-deep", "doctor"]
