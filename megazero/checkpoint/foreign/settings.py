"""The model that the arguments of a training of Megatron-LM or Megatron-DeepSpeed describe, as megazero's settings.

Such a checkpoint has all arguments of the program that saved it.  `FIXED` are those that describe what no model here
has; any other value than the given ones is refused by the argument's name.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from megazero.checkpoint.foreign.pickles import Record
from megazero.config.model import ModelConfig
from megazero.errors import CheckpointError, Problem, raise_problems

_MAX_NUMBER = 2**31
_OFF = (None, False)

FIXED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "num_experts": (None, 0, 1),
        "multi_latent_attention": _OFF,
        "apply_layernorm_1p": _OFF,
        "layernorm_zero_centered_gamma": _OFF,
        "apply_residual_connection_post_layernorm": _OFF,
        "rotary_interleaved": _OFF,
        "no_rope_freq": (None,),
        "mtp_num_layers": (None, 0),
        "is_hybrid_model": _OFF,
        "hybrid_override_pattern": (None,),
        "hybrid_layer_pattern": (None,),
        "heterogeneous_layers_config_path": (None,),
        "linear_attention_freq": (None,),
        "experimental_attention_variant": (None,),
        "window_size": (None,),
        "window_attn_skip_freq": (None,),
        "chunk_attention": _OFF,
        "attention_output_gate": _OFF,
        "qk_l2_norm": _OFF,
        "softmax_type": (None, "vanilla"),
        "quick_geglu": _OFF,
        "geglu": _OFF,
        "glu_activation": (None,),
        "glu_linear_offset": (None, 0),
        "activation_func_clamp_value": (None,),
        "retro_add_retriever": _OFF,
        "bert_binary_head": _OFF,
        "use_mup": _OFF,
    }
)
# Whole numbers that a model is made of; the first three have to be there.
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
_WHOLE = (
    *_REQUIRED,
    *("ffn_hidden_size", "kv_channels", "seq_length", "max_position_embeddings", "num_query_groups"),
    "num_key_value_heads",
)
# Megatron-DeepSpeed's enumeration, by the values of its members.
_POSITIONS: Mapping[object, str] = MappingProxyType({1: "rope", 2: "learned_absolute", 3: "alibi"})
_OTHER_NAMES: Mapping[object, str] = MappingProxyType({"rotary": "rope", "absolute": "learned_absolute"})


def arguments_of(content: object, *, given: str) -> Mapping[str, Any]:
    """Return the arguments in what a checkpoint's file holds; raises CheckpointError if there are none."""
    found = content.get("args") if isinstance(content, dict) else None
    arguments = found.fields() if isinstance(found, Record) else found if isinstance(found, dict) else {}
    if not arguments:
        rule = "a checkpoint of Megatron-LM or Megatron-DeepSpeed has the arguments of its training, as `args`"
        raise CheckpointError(Problem(given, rule))
    return arguments


def model_of(arguments: Mapping[str, Any], *, vocab_size: int, given: str) -> ModelConfig:
    """Return the model that arguments describe.  Raises CheckpointError with all that megazero hasn't."""
    raise_problems(CheckpointError, _problems(arguments, given))
    heads, groups = arguments["num_attention_heads"], _groups(arguments)
    width = arguments["hidden_size"] // heads
    has_biases = arguments.get("add_bias_linear", not arguments.get("disable_bias_linear", False))
    settings: dict[str, Any] = {
        "num_layers": arguments["num_layers"],
        "hidden_size": arguments["hidden_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "kv_channels": None if arguments.get("kv_channels") == width else arguments.get("kv_channels"),
        "ffn_hidden_size": arguments.get("ffn_hidden_size"),
        "seq_length": arguments.get("seq_length") or arguments.get("max_position_embeddings"),
        "max_position_embeddings": arguments.get("max_position_embeddings"),
        "position_embedding_type": _positions(arguments),
        "normalization": _norm(arguments),
        "norm_epsilon": _number(arguments, "norm_epsilon", _number(arguments, "layernorm_epsilon", 1e-5)),
        "disable_bias_linear": not has_biases,
        "add_qkv_bias": bool(arguments.get("add_qkv_bias")) and not has_biases,
        "swiglu": bool(arguments.get("swiglu")),
        "squared_relu": bool(arguments.get("squared_relu")),
        "qk_layernorm": bool(arguments.get("qk_layernorm")),
        "embed_layernorm": bool(arguments.get("embed_layernorm")),
        "hidden_dropout": _number(arguments, "hidden_dropout", 0.1),
        "attention_dropout": _number(arguments, "attention_dropout", 0.1),
        "init_method_std": _number(arguments, "init_method_std", 0.02),
        "untie_embeddings_and_output_weights": bool(arguments.get("untie_embeddings_and_output_weights")),
        "vocab_size": vocab_size,
    }
    if settings["position_embedding_type"] == "rope":
        settings |= {
            "rotary_base": _number(arguments, "rotary_base", _number(arguments, "rope_theta", 10_000.0)),
            "rotary_percent": _number(arguments, "rotary_percent", 1.0),
            "rotary_seq_len_interpolation_factor": _number(arguments, "rotary_seq_len_interpolation_factor", 1.0),
            "use_rope_scaling": bool(arguments.get("use_rope_scaling")),
        }
        if settings["use_rope_scaling"]:
            settings["rope_scaling_factor"] = _number(arguments, "rope_scaling_factor", 8.0)
    try:
        return ModelConfig(**settings)
    except ValidationError as error:
        found = ((f"{each['loc'][-1]} {str(each['input'])[:80]}", each["msg"]) for each in error.errors())
        problems = (Problem(f"{given}: {setting}", rule) for setting, rule in found)
        raise CheckpointError(*problems) from None


def has_exact_gelu(arguments: Mapping[str, Any]) -> bool:
    """Return True if the training computed GELU itself, where megazero has its approximation by tanh."""
    others = ("swiglu", "squared_relu", "openai_gelu", "onnx_safe")
    has_biases = arguments.get("add_bias_linear", not arguments.get("disable_bias_linear", False))
    fuses = arguments.get("bias_gelu_fusion", True) and has_biases
    return not fuses and not any(arguments.get(name) for name in others)


def _problems(arguments: Mapping[str, Any], given: str) -> Iterator[Problem]:
    for name, legal in FIXED.items():
        found = arguments.get(name)
        found = found[0] if isinstance(found, list) and len(found) == 1 else found
        if found not in legal:
            yield Problem(f"{given}: {name} {str(found)[:80]}", "no model of megazero has this", str(legal[-1]))
    for name in _WHOLE:
        found = arguments.get(name)
        if (found is None and name in _REQUIRED) or (
            found is not None and not (type(found) is int and 0 < found < _MAX_NUMBER)
        ):
            yield Problem(f"{given}: {name} {str(found)[:80]}", f"is a whole number below {_MAX_NUMBER}")
            return
    heads, hidden = arguments["num_attention_heads"], arguments["hidden_size"]
    if heads % _groups(arguments) or (arguments.get("kv_channels") is None and hidden % heads):
        given = f"{given}: width {hidden}, {heads} heads in {_groups(arguments)} groups"
        yield Problem(given, "heads divide the width, and groups the heads")


def _groups(arguments: Mapping[str, Any]) -> int:
    """Return the number of heads of keys and values."""
    if arguments.get("group_query_attention"):
        return int(arguments.get("num_query_groups") or 1)
    return int(arguments.get("num_key_value_heads") or arguments["num_attention_heads"])  # Megatron-DeepSpeed's


def _number(arguments: Mapping[str, Any], name: str, otherwise: float) -> float:
    found = arguments.get(name)
    return float(found) if isinstance(found, int | float) and abs(found) < 2**53 else otherwise


def _positions(arguments: Mapping[str, Any]) -> str:
    """Return the kind of positions, text or the member of an enumeration."""
    found = arguments.get("position_embedding_type", "learned_absolute")
    if isinstance(found, Record):
        member = found.arguments[0] if found.arguments else None
        found = _POSITIONS.get(member, member) if isinstance(member, int | str) else str(member)
    if arguments.get("use_rotary_position_embeddings"):
        return "rope"
    if arguments.get("add_position_embedding") is False and found == "learned_absolute":
        return "none"
    return _OTHER_NAMES.get(found, found) if isinstance(found, str) else str(found)[:80]


def _norm(arguments: Mapping[str, Any]) -> object:
    found = arguments.get("normalization", "LayerNorm")
    by_name = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    return by_name.get(found.lower(), found) if isinstance(found, str) else found
