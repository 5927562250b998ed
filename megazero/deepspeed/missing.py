"""The errors for names of DeepSpeed's that are not there."""

from collections.abc import Mapping
from types import MappingProxyType

from megazero.errors import Problem, UsageError

_PIPELINES = "a model is not cut into stages here; pretrain_gpt.py has --pipeline-model-parallel-size"
_INFERENCE = "there are no kernels for inference; the engine of a frozen model evaluates and generates"
_COMPRESSION = "weights keep their values and number format"
_TENSORS = "a model is not split here; torch's parallelize_module and mpu are taken"

# {name of DeepSpeed's: why it is not there}
REASONS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("PipelineEngine", "PipelineModule", "pipe", "eval_batch", "train_batch"), _PIPELINES),
        **dict.fromkeys(
            ("InferenceEngine", "default_inference_config", "inference", "init_inference", "module_inject"), _INFERENCE
        ),
        **dict.fromkeys(("DeepSpeedHybridEngine", "DeepSpeedInferenceConfig", "replace_transformer_layer"), _INFERENCE),
        **dict.fromkeys(("DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"), _INFERENCE),
        **dict.fromkeys(("compression", "init_compression"), _COMPRESSION),
        **dict.fromkeys(("set_autotp_mode", "tp_model_init"), _TENSORS),
        **dict.fromkeys(
            ("curriculum_scheduler_legacy", "set_custom_curriculum_learning_schedule"),
            "the length of a step is a function of its number, which engine.curriculum_seqlen gives",
        ),
        **dict.fromkeys(
            ("curriculum_learning_enabled", "set_data_post_process_func"),
            "samples come in the program's own order; engine.curriculum_seqlen gives the length of their rows",
        ),
        "MiCS_Init": "parameters are partitioned over all data-parallel ranks",
        "OnDevice": "zero.Init makes a model that no rank could hold; torch.device(...) is a context too",
        "TiledLinearReturnBias": "TiledLinear adds the bias itself",
        "groups": "process groups are the engine's, engine.mesh, or the program's own",
        "tput_timer": "nothing is timed beside the program's own timers",
    }
)


class MissingNameError(UsageError, AttributeError):
    """A name of DeepSpeed's is not there; `hasattr` is False for it."""


def missing_name(name: str, owner: str = "megazero.deepspeed") -> MissingNameError:
    """Return the error for a name that is not there, with the reason if there is one."""
    rule = REASONS.get(name, f"{owner} has no {name}")
    return MissingNameError(Problem(f"{owner}.{name}", rule, "what docs/deepspeed.md lists"))


def refuse(call: str, reason: str, legal: str = "") -> UsageError:
    """Return the error for a call, or an argument of one, that is not served."""
    return UsageError(Problem(call, reason, legal))
