"""The types of learning-rate schedules in DeepSpeed's configurations; megazero's own have names in small letters."""

from megazero.config.schedules import SCHEDULES

VALID_LR_SCHEDULES = [name for name in SCHEDULES if name[0].isupper()]
