"""ZeRO: which model states the data-parallel processes share out among themselves."""

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, setting


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ZeroConfig:
    """Stage and buckets (Rajbhandari et al., arXiv 1910.02054, section 5)."""

    zero_stage: int = setting(
        1,
        help="0: every process holds all model states; 1: optimizer states are partitioned; 2: gradients too",
        beyond="stage 3, partitioned parameters, is not there yet",
        ge=0,
        le=2,
    )
    reduce_bucket_size: int = setting(
        16_777_216, help="most gradient elements that one reduction moves", unit="elements", ge=1
    )
    overlap_comm: bool = setting(True, help="let reductions run while backward computes")
