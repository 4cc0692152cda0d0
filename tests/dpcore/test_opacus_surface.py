"""Every public name of Opacus exists in dpcore with a compatible signature, or is listed here with a reason."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import inspect
import pkgutil
import warnings

import pytest

pytest.importorskip("opacus")

INTERNAL = "a helper of Opacus' own implementation; dpcore's is built otherwise"
RULES = "dpcore's rules intercept torch functions; a rule for a layer of the user's is registered by decorator"
ONE_LOSS = "one backward pass does everything: the loss of the ghost mode is an ordinary tensor"
SHARDED = "sharded modules have no mode of their own"
PIECES = "BatchMemoryManager cuts batches that were loaded; index lists are not cut"
RANKS = "every optimiser takes ranks"
EMPTY = "an empty batch is cut from a real one, so its structure need not be learned"

EXCEPTIONS = {
    "data_loader": {
        EMPTY: "CollateFnWithEmpty wrap_collate_with_empty",
        INTERNAL: "shape_safe dtype_safe",
        "secure mode draws batches from the operating system": "switch_generator",
    },
    "distributed": {
        "ranks exchange one clipped sum, not gradients": "average_gradients",
    },
    "grad_sample": {
        "a base class: build GradSampleHooks": "AbstractGradSampleHooks",
        INTERNAL: "create_or_accumulate_grad_sample",
        SHARDED: (
            "GradSampleHooksFastGradientClippingFSDP GradSampleModuleFastGradientClippingFSDP "
            "GradSampleHooksFastGradientClippingTP GradSampleModuleFastGradientClippingTP"
        ),
        RULES: (
            "compute_conv_grad_sample compute_sequence_bias_grad_sample compute_rnn_linear_grad_sample "
            "compute_embedding_grad_sample compute_embedding_norm_sample compute_group_norm_grad_sample "
            "compute_instance_norm_grad_sample compute_layer_norm_grad_sample compute_linear_grad_sample "
            "compute_rms_norm_grad_sample"
        ),
    },
    "layers": {
        "the layers are torch's own, so that no parameter changes its name": "RenameParamsMixin",
    },
    "optimizers": {
        RANKS: "DistributedDPOptimizer DistributedDPOptimizerFastGradientClipping SimpleDistributedPerLayerOptimizer",
        "a misspelling in Opacus": "DistributedDPOptimizerFastGradientlipping",
        SHARDED: "FSDPOptimizerFastGradientClipping",
    },
    "utils.batch_memory_manager": {
        PIECES: "BatchSplittingSampler",
        "behind dpcore.as_opacus only": "wrap_data_loader",
    },
    "utils.fast_gradient_clipping_utils": {
        ONE_LOSS: "DPTensorFastGradientClipping",
    },
    "utils.per_sample_gradients_utils": {
        INTERNAL: (
            "clone_module is_batch_empty ModelWithLoss check_torch_version_for_ew_sample get_grad_sample_modes "
            "compute_microbatch_grad_sample_tensor_or_seq compute_grad_samples_microbatch_and_opacus "
            "unpack_packedsequences"
        ),
        "compute_grad_sample": "compute_opacus_grad_sample",
    },
}
"""Module -> why it lacks names of Opacus' -> the names."""
ARGUMENTS = {
    ("data_loader", "DPDataLoader", "drop_last"): "has no meaning for Poisson batches",
    ("data_loader", "DPDataLoader", "batch_first"): "an empty batch is cut from a real one",
    ("data_loader", "DPDataLoader", "rand_on_empty"): "a random example would leak; see make_private",
    ("utils.per_sample_gradients_utils", "compute_microbatch_grad_sample", "chunk_method"): INTERNAL,
    ("accountants", "RDPAccountant", "alphas"): "the orders are searched",
}
MODULES = [
    "",
    "accountants",
    "accountants.utils",
    "data_loader",
    "distributed",
    "grad_sample",
    "layers",
    "optimizers",
    "schedulers",
    "utils.batch_memory_manager",
    "utils.fast_gradient_clipping_utils",
    "utils.per_sample_gradients_utils",
    "utils.uniform_sampler",
    "validators",
    "validators.errors",
]


def _names(reasons: dict[str, str]) -> set[str]:
    """The names in a table of reasons."""
    return {name for names in reasons.values() for name in names.split()}


def _import(library: str, module: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"{library}.{module}" if module else library)


def _public(module: str) -> dict[str, object]:
    """Functions and classes that the module of Opacus names in ``__all__``, or defines."""
    opacus = _import("opacus", module)
    names = [n for n in getattr(opacus, "__all__", vars(opacus)) if hasattr(opacus, n)]
    return {
        n: v
        for n in names
        if (inspect.isclass(v := getattr(opacus, n)) or inspect.isfunction(v))
        and v.__module__.startswith(opacus.__name__ if opacus.__name__ != "opacus" else "opacus.")
        and (not n.startswith("_") or hasattr(opacus, "__all__"))
    }


def _parameters(value: object) -> tuple[set[str], bool]:
    parameters = inspect.signature(value).parameters.values()
    named = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return named - {"self"}, any(p.kind is p.VAR_KEYWORD for p in parameters)


@pytest.mark.parametrize("module", MODULES)
def test_public_names_and_their_arguments(module):
    exceptions = _names(EXCEPTIONS.get(module, {}))
    ours = _import("dpcore", module)
    for name, theirs in _public(module).items():
        if not hasattr(ours, name):
            assert name in exceptions, f"dpcore.{module} has no {name}"
        if name in exceptions:
            continue
        value = getattr(ours, name)
        if inspect.isclass(theirs) and issubclass(theirs, Exception):
            assert issubclass(value, Exception)
            bases = [base.__name__ for base in theirs.__mro__ if issubclass(base, Exception)]
            for base in bases:
                assert issubclass(value, getattr(ours, base, None) or getattr(builtins, base)), f"{name} is no {base}"
            continue
        wanted, _ = _parameters(theirs)
        found, takes_any = _parameters(value)
        missing = {p for p in wanted - found if not takes_any and (module, name, p) not in ARGUMENTS}
        assert not missing, f"dpcore.{module}.{name} does not take {missing}"


@pytest.mark.parametrize(
    ("module", "name", "exceptions"),
    [
        ("", "PrivacyEngine", {}),
        ("grad_sample", "GradSampleModule", dict.fromkeys(
            ["GRAD_SAMPLERS", "iterate_submodules", "add_hooks", "capture_activations_hook", "capture_backprops_hook",
             "rearrange_grad_samples"], RULES)),
        ("optimizers", "DPOptimizer", {}),
        ("optimizers", "DPPerLayerOptimizer", {}),
        ("optimizers", "AdaClipDPOptimizer", {}),
        ("accountants", "IAccountant", {}),
        ("validators", "ModuleValidator", {
            "fix_and_validate": "PrivacyEngine.get_compatible_module does both"}),
    ],
)  # fmt: skip
def test_public_methods_and_their_arguments(module, name, exceptions):
    theirs, ours = getattr(_import("opacus", module), name), getattr(_import("dpcore", module), name)
    for method, value in inspect.getmembers(theirs):
        defined = any(method in vars(c) and c.__module__.startswith("opacus") for c in theirs.__mro__)
        if method.startswith("_") or not defined:
            continue
        if not hasattr(ours, method):
            assert method in exceptions, f"{name} has no {method}"
        elif inspect.isfunction(value) or inspect.ismethod(value):
            wanted, _ = _parameters(value)
            found, takes_any = _parameters(getattr(ours, method))
            assert takes_any or wanted - {"closure"} <= found, f"{name}.{method} does not take {wanted - found}"


NO_SUCH_MODULE = {
    "an accountant's step and get_epsilon, or get_privacy_spent of the one by Renyi divergences, tell the same": (
        "accountants.analysis accountants.analysis.gdp accountants.analysis.prv accountants.analysis.prv.compose "
        "accountants.analysis.prv.domain accountants.analysis.prv.prvs accountants.analysis.rdp"
    ),
    RULES: (
        "grad_sample.conv grad_sample.dp_multihead_attention grad_sample.dp_rnn grad_sample.embedding "
        "grad_sample.embedding_norm_sample grad_sample.functorch grad_sample.group_norm grad_sample.instance_norm "
        "grad_sample.layer_norm grad_sample.linear grad_sample.rms_norm"
    ),
    SHARDED: (
        "grad_sample.grad_sample_module_fast_gradient_clipping_fsdp "
        "grad_sample.grad_sample_module_fast_gradient_clipping_tp optimizers.fsdpoptimizer_fast_gradient_clipping "
        "utils.fsdp_utils"
    ),
    RANKS: "optimizers.ddp_perlayeroptimizer optimizers.ddpoptimizer optimizers.ddpoptimizer_fast_gradient_clipping",
    'clipping="adaptive" serves every mode': "utils.adaptive_clipping utils.adaptive_clipping.adaptive_clipping_utils",
    "ModuleValidator.validate and fix do it all": (
        "validators.batch_norm validators.gru validators.instance_norm validators.lstm validators.multihead_attention"
    ),
    INTERNAL: (
        "layers.param_rename optimizers.utils utils.module_utils utils.packed_sequences utils.tensor_utils version"
    ),
}
"""Why there is no module of the same path -> modules of Opacus."""


def test_every_module_has_opacus_path_or_a_reason():
    opacus = _import("opacus", "")
    found = [module.name.removeprefix("opacus.") for module in pkgutil.walk_packages(opacus.__path__, "opacus.")]
    for module in (module for module in found if not module.startswith("tests")):
        if not _exists(f"dpcore.{module}"):
            assert module in _names(NO_SUCH_MODULE), f"there is no dpcore.{module}"
        elif module.startswith(("accountants.", "grad_sample.gsm", "grad_sample.grad", "optimizers.", "validators.u")):
            theirs, ours = _import("opacus", module), _import("dpcore", module)
            classes = [n for n, v in vars(theirs).items() if inspect.isclass(v) and v.__module__ == theirs.__name__]
            missing = {n for n in classes if not hasattr(ours, n)}
            assert not missing, f"dpcore.{module} has no {missing}"


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is none of ours either
        return False
