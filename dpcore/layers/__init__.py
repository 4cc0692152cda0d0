"""Layers under the names that Opacus gives them.

Plain ``torch.nn`` layers can be trained as they are; these exist for scripts, and for ``state_dict``s, that use the
other names.
"""

from dpcore.layers.dp_multihead_attention import DPMultiheadAttention, SequenceBias
from dpcore.layers.dp_rnn import DPGRU, DPLSTM, DPRNN, RNNLinear

__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention", "RNNLinear", "SequenceBias"]
