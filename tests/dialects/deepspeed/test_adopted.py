"""What a configuration contributes to a run, while it is gathered."""

from megazero.config.origin import Origin
from megazero.config.validate import Said
from megazero.dialects.deepspeed.adopted import Adopted
from megazero.dialects.deepspeed.reading import read
from megazero.errors import Problem


def test_contributions_keep_their_source() -> None:
    adopted = Adopted(read({}, "ds.json"))
    adopted.say("lr_decay_style", "linear", 'ds.json: scheduler.type: "WarmupDecayLR"')
    adopted.default("adam_eps", 1e-8, "optimizer.params.eps")
    adopted.refuse("ds.json: x: 1", "there is no x", "leave out x")
    # What was said goes the way of flags, with their dashes; a default goes straight to its setting.
    said = 'ds.json: scheduler.type: "WarmupDecayLR"', "ds.json: optimizer.params.eps: 1e-08 (DeepSpeed's default)"
    assert adopted.said == [Said("lr-decay-style", "linear", said[0], Origin.FOREIGN)]
    assert adopted.defaults == [Said("adam_eps", 1e-8, said[1], Origin.DEFAULT)]
    assert adopted.reading.findings.problems == [Problem("ds.json: x: 1", "refused: there is no x", "leave out x")]
