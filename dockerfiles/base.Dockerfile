# What every framework's image stands on: Python 3.11 and nothing of ours. FROM_IMAGE is python:3.11-slim where an image
# registry can be reached, a CUDA runtime image with Python 3.11 for GPUs, or the one that
# `dpbench image base --from-debootstrap` makes. Built without a network.
ARG FROM_IMAGE=python:3.11-slim
FROM ${FROM_IMAGE}
# A base that cannot make an environment is refused here, not halfway through a framework.
RUN python3 -c "import sys, venv, ensurepip; assert sys.version_info[:2] == (3, 11), sys.version"
LABEL dpbench.kind="base"
