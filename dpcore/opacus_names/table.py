"""Opacus' modules, the names that dpcore does not have at the same places, and what becomes of each."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NoReturn

from dpcore.errors import UnsupportedError

VERSION = "1.6.0"
"""Of the Opacus whose surface this is."""

_SAMPLERS = "register_grad_sampler register_norm_sampler"
_ERRORS = "ShouldReplaceModuleError UnsupportedModuleError UnsupportableModuleError IllegalModuleConfigurationError"
_FIXES = f"{_ERRORS} register_module_fixer register_module_validator fix validate"
_PRV = (
    "Domain PoissonSubsampledGaussianPRV TruncatedPrivacyRandomVariable compose_heterogeneous compute_safe_domain_size"
)
_GHOST = "GradSampleHooksFastGradientClipping GradSampleModuleFastGradientClipping DPOptimizerFastGradientClipping"
_FSDP = "GradSampleHooksFastGradientClippingFSDP GradSampleModuleFastGradientClippingFSDP"
_TP = "GradSampleHooksFastGradientClippingTP GradSampleModuleFastGradientClippingTP"
_MODULES = "has_trainable_params trainable_modules trainable_parameters requires_grad"
_CAPTURE = "create_or_accumulate_grad_sample promote_current_grad_sample ft_compute_per_sample_gradient prepare_layer"
_RULES = " ".join(
    f"compute_{kind}_grad_sample"
    for kind in ("conv", "embedding", "group_norm", "instance_norm", "layer_norm", "linear", "rms_norm", "rnn_linear")
)
_MARKS = "params _check_processed_flag _check_processed_flag_tensor _mark_as_processed _generate_noise"
_RNN = "DPRNN DPGRU DPLSTM RNNLinear"
_CELLS = "RenameParamsMixin apply_permutation DPRNNCellBase DPRNNCell DPGRUCell DPLSTMCell RNN_CELL_TYPES DPRNNBase"
_ADAPTIVE = "DPLossFastGradientAdaptiveClipping DPTensorFastGradientAdaptiveClipping PrivacyEngineAdaptiveClipping"
_LAYER = "DistributedPerLayerOptimizer SimpleDistributedPerLayerOptimizer"

PLACES = {
    "": "GradSampleModule GradSampleModuleFastGradientClipping PrivacyEngine",
    "accountants": "",
    "accountants.accountant": "DPOptimizer",
    "accountants.analysis": "",
    "accountants.analysis.gdp": "compute_mu_uniform compute_mu_poisson delta_eps_mu eps_from_mu compute_eps_uniform "
    "compute_eps_poisson",
    "accountants.analysis.prv": f"{_PRV} DiscretePRV discretize",
    "accountants.analysis.prv.compose": f"{_PRV} DiscretePRV",
    "accountants.analysis.prv.domain": f"{_PRV} RDPAccountant",
    "accountants.analysis.prv.prvs": f"{_PRV} DiscretePRV discretize",
    "accountants.analysis.rdp": "compute_rdp get_privacy_spent",
    "accountants.gdp": "",
    "accountants.prv": f"IAccountant {_PRV} discretize",
    "accountants.rdp": "",
    "accountants.registry": "GaussianAccountant PRVAccountant RDPAccountant",
    "accountants.utils": "MAX_SIGMA get_noise_multiplier",
    "data_loader": "CollateFnWithEmpty wrap_collate_with_empty shape_safe dtype_safe switch_generator",
    "distributed": "average_gradients",
    "grad_sample": f"{_RULES} {_FSDP} {_TP} compute_sequence_bias_grad_sample compute_embedding_norm_sample "
    "create_or_accumulate_grad_sample",
    "grad_sample.conv": f"unfold2d unfold3d convolution2d_backward_as_a_convolution {_SAMPLERS} "
    "compute_conv_grad_sample",
    "grad_sample.dp_multihead_attention": f"SequenceBias {_SAMPLERS} compute_sequence_bias_grad_sample",
    "grad_sample.dp_rnn": f"RNNLinear {_SAMPLERS} compute_rnn_linear_grad_sample",
    "grad_sample.embedding": f"{_SAMPLERS} compute_embedding_grad_sample compute_embeddingbag_gradsampler "
    "compute_embedding_norm_sample",
    "grad_sample.embedding_norm_sample": "compute_embedding_norm_sample",
    "grad_sample.functorch": "RNNLinear make_functional prepare_layer ft_compute_per_sample_gradient",
    "grad_sample.grad_sample_module": f"{_CAPTURE} {_MODULES} {_RNN} GradSampleHooks AbstractGradSampleHooks",
    "grad_sample.grad_sample_module_fast_gradient_clipping": f"{_CAPTURE} {_MODULES} {_RNN} GradSampleHooks "
    "AbstractGradSampleModule create_norm_sample",
    "grad_sample.grad_sample_module_fast_gradient_clipping_fsdp": f"{_FSDP} {_GHOST} {_CAPTURE} {_MODULES} "
    "AbstractGradSampleModule",
    "grad_sample.grad_sample_module_fast_gradient_clipping_tp": f"{_TP} {_GHOST} AbstractGradSampleModule",
    "grad_sample.group_norm": f"{_SAMPLERS} compute_group_norm_grad_sample",
    "grad_sample.gsm_base": "trainable_parameters OPACUS_PARAM_MONKEYPATCH_ATTRS",
    "grad_sample.gsm_exp_weights": "AbstractGradSampleModule",
    "grad_sample.gsm_no_op": "AbstractGradSampleModule AbstractGradSampleHooks",
    "grad_sample.instance_norm": f"{_SAMPLERS} compute_instance_norm_grad_sample",
    "grad_sample.layer_norm": f"{_SAMPLERS} compute_layer_norm_grad_sample sum_over_all_but_batch_and_last_n",
    "grad_sample.linear": f"{_SAMPLERS} compute_linear_grad_sample compute_linear_norm_sample",
    "grad_sample.rms_norm": f"{_SAMPLERS} compute_rms_norm_grad_sample sum_over_all_but_batch_and_last_n",
    "grad_sample.utils": f"{_FSDP} {_TP} {_SAMPLERS} AbstractGradSampleModule GradSampleModule",
    "layers": "RenameParamsMixin",
    "layers.dp_multihead_attention": "",
    "layers.dp_rnn": f"compute_seq_lengths {_CELLS}",
    "layers.param_rename": "RenameParamsMixin filter_out_old_keys",
    "lightning": "",
    "optimizers": f"{_LAYER} DistributedDPOptimizer DistributedDPOptimizerFastGradientClipping "
    "FSDPOptimizerFastGradientClipping",
    "optimizers.adaclipoptimizer": f"{_MARKS} DPOptimizer",
    "optimizers.ddp_perlayeroptimizer": f"{_LAYER} {_MARKS} DPOptimizer DPPerLayerOptimizer DistributedDPOptimizer",
    "optimizers.ddpoptimizer": f"{_MARKS} DPOptimizer DistributedDPOptimizer",
    "optimizers.ddpoptimizer_fast_gradient_clipping": "DPOptimizerFastGradientClipping "
    "DistributedDPOptimizerFastGradientClipping",
    "optimizers.fsdpoptimizer_fast_gradient_clipping": f"{_MARKS} DPOptimizerFastGradientClipping "
    "FSDPOptimizerFastGradientClipping",
    "optimizers.optimizer": _MARKS,
    "optimizers.optimizer_fast_gradient_clipping": _MARKS,
    "optimizers.perlayeroptimizer": _MARKS,
    "optimizers.utils": "params",
    "privacy_engine": "switch_generator DPDDP AbstractGradSampleModule GradSampleHooks GradSampleModule get_gsm_class "
    "prepare_module get_optimizer_class get_noise_multiplier _GradClipScheduler _NoiseScheduler",
    "schedulers": "",
    "schedulers.grad_clip_scheduler": "DPOptimizer",
    "schedulers.noise_scheduler": "DPOptimizer",
    "utils": "",
    "utils.adaptive_clipping": _ADAPTIVE,
    "utils.adaptive_clipping.adaptive_clipping_utils": f"{_ADAPTIVE} {_GHOST} PrivacyEngine GradSampleModule DPDDP "
    "DPLossFastGradientClipping DPTensorFastGradientClipping",
    "utils.batch_memory_manager": "BatchSplittingSampler wrap_data_loader UniformWithReplacementSampler "
    "DistributedUniformWithReplacementSampler",
    "utils.fast_gradient_clipping_utils": f"{_GHOST} DPTensorFastGradientClipping",
    "utils.fsdp_utils": f"{_FSDP} FSDP2Wrapper has_trainable_params has_params iterate_submodules",
    "utils.module_utils": f"{_MODULES} parametrized_modules clone_module get_submodule are_state_dict_equal",
    "utils.packed_sequences": "compute_seq_lengths",
    "utils.per_sample_gradients_utils": "wrap_model trainable_parameters compute_seq_lengths clone_module "
    "is_batch_empty ModelWithLoss compute_opacus_grad_sample check_torch_version_for_ew_sample get_grad_sample_modes "
    "compute_microbatch_grad_sample_tensor_or_seq compute_grad_samples_microbatch_and_opacus unpack_packedsequences",
    "utils.tensor_utils": "calc_sample_norms calc_sample_norms_one_layer sum_over_all_but_batch_and_last_n unfold2d "
    "unfold3d filter_dilated_rows",
    "utils.uniform_sampler": "",
    "validators": "",
    "validators.batch_norm": _FIXES,
    "validators.errors": "",
    "validators.gru": f"{_FIXES} DPGRU",
    "validators.instance_norm": f"{_FIXES} clone_module",
    "validators.lstm": f"{_FIXES} DPLSTM",
    "validators.module_validator": f"{_ERRORS} clone_module get_submodule trainable_modules",
    "validators.multihead_attention": f"{_FIXES} DPMultiheadAttention",
    "validators.utils": "ModuleValidator DEFAULT_MODULE_VALIDATOR",
    "version": "__version__",
}
"""Every module of Opacus, and its names beside those that the module of dpcore at the same path has."""

_HERE = "dpcore.opacus_names"
RENAMED = {
    **dict.fromkeys([*_RULES.split(), "compute_sequence_bias_grad_sample"], f"{_HERE}.rules:grad_sample"),
    **dict.fromkeys(["compute_linear_norm_sample", "compute_embedding_norm_sample"], f"{_HERE}.rules:norm_sample"),
    "DEFAULT_MODULE_VALIDATOR": "dpcore.validators:ModuleValidator",
    "DPDDP": "dpcore.distributed:DifferentiallyPrivateDistributedDataParallel",
    "OPACUS_PARAM_MONKEYPATCH_ATTRS": f"{_HERE}.modules:MONKEYPATCHED",
    "_check_processed_flag_tensor": f"{_HERE}.optimizer:_check_processed_flag",
    "__version__": f"{_HERE}.table:VERSION",
    "compute_opacus_grad_sample": "dpcore.utils.per_sample_gradients_utils:compute_grad_sample",
    "fix": "dpcore.validators:ModuleValidator.fix",
    "get_noise_multiplier": f"{_HERE}.analysis:get_noise_multiplier",
    "validate": "dpcore.validators:ModuleValidator.validate",
}
"""Names that stand for something of another name."""

HOLDERS = (
    *(f"{_HERE}.{name}" for name in ("optimizer", "modules", "analysis")),
    *("dpcore.optimizers", "dpcore.grad_sample", "dpcore.layers.dp_rnn", "dpcore.layers", "dpcore.validators.errors"),
    *("dpcore.validators", "dpcore.accountants", "dpcore.schedulers", "dpcore.utils.uniform_sampler"),
    *("dpcore.utils.fast_gradient_clipping_utils", "dpcore"),
)
"""Modules in which the other names are looked for."""

REASONS = {
    "one process, or all ranks of the module's wrapper, are served by DPOptimizer itself, which make_private returns": (
        f"{_LAYER} DistributedDPOptimizer DistributedDPOptimizerFastGradientClipping"
    ),
    "a module to which fully_shard was applied needs no mode of its own: hand it to make_private": (
        f"{_FSDP} {_TP} FSDPOptimizerFastGradientClipping FSDP2Wrapper has_params iterate_submodules"
    ),
    "the distribution of the privacy loss is formed otherwise: PRVAccountant's step() and get_epsilon() tell epsilon": (
        f"{_PRV} DiscretePRV discretize"
    ),
    "an empty batch keeps its structure by itself": "CollateFnWithEmpty wrap_collate_with_empty shape_safe dtype_safe",
    "the ranks exchange one clipped sum, not gradients": "average_gradients",
    "layers are torch's own, whose parameters keep their names": f"{_CELLS} filter_out_old_keys",
    "gradients by example are recorded from torch's functions, not captured at layers; read p.grad_sample, or give a "
    "layer a rule by register_grad_sampler": f"{_CAPTURE} make_functional create_norm_sample unfold3d "
    "convolution2d_backward_as_a_convolution compute_embeddingbag_gradsampler filter_dilated_rows",
    'pass clipping="adaptive" to make_private, which serves every mode': _ADAPTIVE,
    "the loss is an ordinary tensor in every mode": "DPTensorFastGradientClipping",
    "compute_microbatch_grad_sample and check_per_sample_gradients_are_correct do the same": "ModelWithLoss "
    "compute_microbatch_grad_sample_tensor_or_seq compute_grad_samples_microbatch_and_opacus unpack_packedsequences",
}
"""Why names have no meaning here."""
_REASON_OF = {name: reason for reason, names in REASONS.items() for name in names.split()}


class _Refuses(type):
    """The class of what stands in the place of a name without a meaning: nothing is an instance of it."""

    def _refuse(cls) -> NoReturn:
        raise UnsupportedError(f"{cls.__name__} of Opacus has no counterpart in dpcore: {_REASON_OF[cls.__name__]}.")

    def __call__(cls, *args: Any, **options: Any) -> NoReturn:
        cls._refuse()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls._refuse()

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        for base in bases:
            if isinstance(base, _Refuses):
                base._refuse()
        return super().__new__(mcs, name, bases, namespace)


def ours(place: str) -> ModuleType | None:
    """Return dpcore's module at a place of Opacus', None where there is none."""
    name = f"dpcore.{place}".rstrip(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{name}.".startswith(f"{error.name}."):
            raise  # of a library that the module needs
        return None


def named(name: str) -> Any:
    """Return what Opacus' ``name`` stands for."""
    if name in RENAMED:
        module, _, path = RENAMED[name].partition(":")
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        return found
    for holder in HOLDERS:
        module_of = vars(importlib.import_module(holder))
        if name in module_of:
            return module_of[name]
    return _Refuses(name, (), {"__doc__": f"Not in dpcore: {_REASON_OF[name]}."})
