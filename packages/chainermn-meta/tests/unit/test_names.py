"""The names that scripts use, in the modules in which scripts expect them."""

import importlib
import os
import subprocess
import sys

import chainermn
import pytest

import mn_comm
import mn_data
import mn_extensions
import mn_modelpar
import mn_optim

NAMES = {
    "": [
        "CommunicatorBase create_communicator DataSizeError MultiNodeChainList scatter_dataset scatter_index",
        "create_multi_node_checkpointer create_multi_node_evaluator create_multi_node_optimizer",
        "get_epoch_trigger get_n_iterations_for_one_epoch",
        "communicators datasets extensions functions global_except_hook iterators links nccl optimizers",
    ],
    ".communicators": ["CommunicatorBase create_communicator"],
    ".communicators._communication_utility": ["chunked_bcast_obj init_nccl_comm init_ranks"],
    ".communicators._memory_utility": ["DeviceMemory HostPinnedMemory pack_params unpack_params"],
    ".communicators.communicator_base": ["CommunicatorBase"],
    ".communicators.mpi_communicator_base": ["MpiCommunicatorBase"],
    ".communicators.naive_communicator": ["NaiveCommunicator"],
    ".communicators.flat_communicator": ["FlatCommunicator"],
    ".communicators.hierarchical_communicator": ["HierarchicalCommunicator"],
    ".communicators.two_dimensional_communicator": ["TwoDimensionalCommunicator"],
    ".communicators.single_node_communicator": ["SingleNodeCommunicator"],
    ".communicators.non_cuda_aware_communicator": ["NonCudaAwareCommunicator"],
    ".communicators.pure_nccl_communicator": ["PureNcclCommunicator"],
    ".communicators.dummy_communicator": ["DummyCommunicator"],
    ".datasets": [
        "DataSizeError create_empty_dataset scatter_dataset scatter_index",
        "get_epoch_trigger get_n_iterations_for_one_epoch",
    ],
    ".datasets.empty_dataset": ["create_empty_dataset"],
    ".datasets.scatter": ["DataSizeError scatter_dataset scatter_index"],
    ".datasets.scatter_dataset": ["DataSizeError scatter_dataset"],
    ".extensions": [
        "AllreducePersistent GenericMultiNodeEvaluator MultiNodeEarlyStoppingTrigger ObservationAggregator",
        "create_multi_node_checkpointer create_multi_node_evaluator main_rank_only multi_node_snapshot",
    ],
    ".extensions._multi_node_snapshot": ["_MultiNodeSnapshot multi_node_snapshot"],
    ".extensions.allreduce_persistent": ["AllreducePersistent"],
    ".extensions.checkpoint": ["_MultiNodeCheckpointer create_multi_node_checkpointer"],
    ".extensions.multi_node_early_stopping_trigger": ["MultiNodeEarlyStoppingTrigger ObservationAggregator"],
    ".extensions.multi_node_evaluator": ["GenericMultiNodeEvaluator create_multi_node_evaluator"],
    ".extensions.observation_aggregator": ["ObservationAggregator"],
    ".functions": [
        "all_to_all allgather allreduce alltoall bcast gather pseudo_connect recv reduce_scatter scatter send",
    ],
    ".functions.batch_normalization": ["MultiNodeBatchNormalizationFunction"],
    ".functions.collective_communication": [
        "allgather alltoall bcast gather scatter AllGather AllToAll Bcast Gather Scatter"
    ],
    ".functions.point_to_point_communication": ["recv send Recv Send"],
    ".functions.pseudo_connect": ["pseudo_connect"],
    ".global_except_hook": ["add_hook"],
    ".iterators": ["create_multi_node_iterator create_synchronized_iterator"],
    ".iterators.multi_node_iterator": ["create_multi_node_iterator"],
    ".iterators.synchronized_iterator": ["create_synchronized_iterator"],
    ".links": [
        "MultiNodeBatchNormalization MultiNodeChainList create_mnbn_model create_multi_node_n_step_rnn",
    ],
    ".links.batch_normalization": ["MultiNodeBatchNormalization"],
    ".links.create_mnbn_model": ["chainermn create_mnbn_model"],
    ".links.multi_node_chain_list": ["MultiNodeChainList chainermn"],
    ".links.n_step_rnn": ["chainermn create_multi_node_n_step_rnn"],
    ".nccl": [
        "_available get_build_version get_unique_id get_version NcclCommunicator NcclError",
        "NCCL_FLOAT NCCL_FLOAT16 NCCL_FLOAT32 NCCL_FLOAT64 NCCL_SUM",
    ],
    ".optimizers": ["_MultiNodeOptimizer create_multi_node_optimizer"],
    ".testing": ["get_device"],
    ".testing.device": ["get_device"],
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module):
    found = importlib.import_module("chainermn" + module)
    for name in " ".join(NAMES[module]).split():
        assert hasattr(found, name), name


def test_they_are_those_of_the_packages():
    assert chainermn.create_communicator is mn_comm.create_communicator
    assert chainermn.create_multi_node_optimizer is mn_optim.create_multi_node_optimizer
    assert chainermn.scatter_dataset is mn_data.scatter_dataset
    assert chainermn.create_multi_node_evaluator is mn_extensions.create_multi_node_evaluator
    assert chainermn.MultiNodeChainList is mn_modelpar.MultiNodeChainList
    assert chainermn.functions.send is mn_modelpar.functions.send


def test_every_module_is_reached_without_another_import():
    hidden = {".datasets.scatter_dataset", ".functions.pseudo_connect", ".links.create_mnbn_model"}  # by functions
    names = sorted("chainermn" + name for name in NAMES.keys() - hidden)
    loop = f"for name in {names}: assert type(eval(name)) is type(chainermn), name"
    assert python(f"import chainermn\n{loop}") == ""


def test_importing_starts_no_mpi_and_needs_no_library_of_it():
    code = "import sys; sys.modules['mpi4py.MPI'] = None; import chainermn; print('mpi4py' in sys.modules)"
    assert python(code) == "False"


def test_mpi_can_be_set_up_after_the_import():
    code = "import chainermn, mpi4py; mpi4py.rc.threads = False; chainermn.create_communicator('naive')"
    assert python(f"{code}; from mpi4py import MPI; print(MPI.Query_thread() == MPI.THREAD_SINGLE)") == "True"


def test_devices_by_number():
    get_device = chainermn.testing.get_device
    assert get_device().name == "@numpy"
    with pytest.raises(RuntimeError, match="CUDA environment is not correctly set up"):
        get_device(1)
    with pytest.raises(RuntimeError, match="ChainerX"):
        get_device(use_chainerx=True)


def test_a_function_is_not_hidden_by_the_module_of_its_name():
    for name in ("datasets.scatter_dataset", "functions.pseudo_connect", "links.create_mnbn_model"):
        importlib.import_module("chainermn." + name)
        package, _, function = name.partition(".")
        assert callable(getattr(getattr(chainermn, package), function))


def test_the_package_is_ours_and_not_the_one_in_chainers_wheel():
    assert os.path.basename(os.path.dirname(os.path.dirname(chainermn.__file__))) == "chainermn_meta"
    assert chainermn.__name__ == "chainermn"
    assert chainermn.communicators.__name__ == "chainermn.communicators"


def python(code, **environ):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_chainer_may_be_imported_first():
    assert python("import chainer, chainermn; print(chainermn.__version__)") == chainermn.__version__


def test_the_bundled_one_can_be_had_back():
    assert python("import chainermn; print(chainermn.__version__)", CHAINERMN_IMPL="bundled") == "7.8.1"


def test_nothing_heavy_is_imported_that_chainer_does_not_import_itself():
    loaded = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    added = set(python("import chainermn; " + loaded).split()) - set(python("import chainer; " + loaded).split())
    assert not added & {"matplotlib", "scipy", "cupy", "nccl", "h5py", "PIL"}


def test_global_except_hook_is_added_at_import_if_asked_for():
    code = "import sys, chainermn; print(type(sys.excepthook).__name__)"
    assert python(code) == "builtin_function_or_method"
    assert python(code, CHAINERMN_FORCE_ABORT_ON_EXCEPTION="") == "builtin_function_or_method"
    assert python(code, CHAINERMN_FORCE_ABORT_ON_EXCEPTION="1") == "_AbortAllRanks"
    assert python(code, CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS="1") == "_AbortAllRanks"
