"""DeepSpeed's `deepspeed.runtime`: the paths below it from which training programs import.

`lr_schedules` and `utils` are here; the other paths are names of modules elsewhere (`places.py`), and exist from the
import of this package on.
"""

from importlib import import_module

import_module("megazero.deepspeed.places").put_modules("megazero.deepspeed", below="runtime")
