# `docker build --target cpu -t chainermn .` or `--target cuda`; from the root of a clone, with nothing built before.
FROM python:3.12-slim AS wheels
WORKDIR /src
COPY . .
RUN python3 tools/bootstrap.py -s build

FROM python:3.12-slim AS cpu
# Open MPI's and MPICH's launchers start processes on other hosts by ssh.
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 user
COPY --from=wheels /src/dist /wheels
RUN pip install --no-cache-dir --find-links /wheels "chainermn-meta[mpich,examples]"
USER user
WORKDIR /home/user
COPY --chown=user examples examples
ENV OMP_NUM_THREADS=1
CMD ["mpiexec", "-n", "2", "python", "examples/mnist/train_mnist.py", "-x", "naive", "-e", "5"]

# The libraries of CUDA come as wheels; only the driver is the host's: `docker run --gpus all`.
FROM cpu AS cuda
USER root
RUN pip install --no-cache-dir --find-links /wheels "chainermn-meta[cuda12]"
USER user
CMD ["mpiexec", "-n", "1", "python", "examples/mnist/train_mnist.py", "-g", "-e", "5"]
