# The suite on NVIDIA's public PyTorch image, whose torch, torchvision, CUDA and NCCL stay as they are.
#   docker build --tag time-to-train .
#   docker run --rm --gpus all --ipc host --ulimit memlock=-1 -v "$PWD:/suite" -v /raid/mlperf:/data -v "$HOME/runs:/runs" \
#     time-to-train ttt run language_bert baseline --data /data --results /runs/results
# On several machines also: --network host --device /dev/infiniband --cap-add IPC_LOCK
# 26.05 holds torch 2.12.0a0 and CUDA 13.2; tags up to 25.12 hold torch 2.10 or older, and the suite needs 2.11.
# To be checked first: that the driver suits CUDA 13.2 (`ttt doctor`), and the digest of what was pulled, which
# --build-arg BASE=nvcr.io/nvidia/pytorch@sha256:... then pins. We have not built this image.
ARG BASE=nvcr.io/nvidia/pytorch:26.05-py3
FROM ${BASE}
# Mounted over with the repository: code, data and results of the host are used, the environment is the image's.
WORKDIR /suite
COPY . .
# torch and torchvision as installed are the only constraints, and must be the same afterwards: the image's own list
# would refuse packages that it holds in older versions than the suite asks for.
RUN versions='from importlib.metadata import version as v; print(*(f"{n}=={v(n)}" for n in ("torch", "torchvision")), sep="\n")' \
 && python -c "$versions" > /tmp/kept \
 && PIP_CONSTRAINT=/tmp/kept python -m pip install --no-cache-dir --editable '.[train]' \
 && python -c "$versions" | diff /tmp/kept - \
 && git config --system --add safe.directory /suite
