"""Tests the layouts for generation: which are refused with which message, and how a model is cut to fit memory."""

import pytest
from support.each import each
from support.models import small_config

from megazero.errors import TopologyError
from megazero.generate.model_layout import choose_layout, padded_rows, stage_chunks
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import Topology

MODEL = small_config()  # 3 layers, 12 heads of 5, 240 inner elements


@each(("tp", "pp"), [(1, 1), (2, 1), (1, 5), (12, 3), (4, 2)])
def test_one_copy_of_the_model(tp: int, pp: int) -> None:
    assert choose_layout(MODEL, tp=tp, pp=pp, nodes=Nodes((tp * pp,))) == Topology(tp=tp, dp=1, pp=pp)


@each(
    ("tp", "pp", "world", "told"),
    [
        (2, 2, 1, "on 1 process\n.*\n.*legal: 4 processes; --tensor-model-parallel-size 1 --pipeline-model-p.* 1$"),
        (1, 1, 2, "on 2 processes\n.*\n.*legal: 1 process; .*-size 1 .*-size 2; .*-size 2 .*-size 1$"),
        # 5 does not divide 12 heads; 10 pipeline stages are too many for 3 layers.
        (1, 1, 10, "legal: 1 process; --tensor-model-parallel-size 2 --pipeline-model-parallel-size 5$"),
        (5, 1, 5, "size 5\n.*12 heads.*240 inner.*\n.*legal: .*-size 4, --tensor-model-parallel-size 6$"),
        (8, 1, 8, "legal: --tensor-model-parallel-size 6, --tensor-model-parallel-size 12$"),
        (1, 6, 6, "size 6\n.*3 layers.*\n.*legal: --pipeline-model-parallel-size 1 to 5$"),
        (0, 0, 1, "3 topology errors:\n(.|\n)*-size 0\n(.|\n)*-size 0\n(.|\n)*legal: --tensor-[a-z-]* 1 --pipe.* 1$"),
    ],
)
def test_refused_layouts(tp: int, pp: int, world: int, told: str) -> None:
    with pytest.raises(TopologyError, match=told):
        choose_layout(MODEL, tp=tp, pp=pp, nodes=Nodes((world,)))


def test_processes_that_are_left_over_hold_further_copies() -> None:
    nodes = Nodes((2, 2, 2))
    assert choose_layout(MODEL, tp=2, pp=1, nodes=nodes, with_copies=True) == Topology(tp=2, dp=3)
    assert choose_layout(MODEL, tp=1, pp=1, nodes=nodes, with_copies=True) == Topology(dp=6)
    legal = (
        "legal: 4 processes; .* 1 .* 1; .* 1 .* 2; .* 1 .* 3; .* 2 .* 1; .* 2 .* 3; .* 3 .* 1; .* 3 .* 2; .* 6 .* 1$"
    )
    with pytest.raises(TopologyError, match=f"on 6 processes\n.*divides their number\n.*{legal}"):
        choose_layout(MODEL, tp=2, pp=2, nodes=nodes, with_copies=True)
    with pytest.raises(
        TopologyError, match=r"--tensor-model-parallel-size 3 .* on 3 nodes of 2 ranks\n.*inside one node"
    ):
        choose_layout(MODEL, tp=3, pp=1, nodes=nodes, with_copies=True)


def test_tensor_parallelism_stays_inside_a_node() -> None:
    tensor, stages = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
    with pytest.raises(TopologyError) as caught:
        choose_layout(MODEL, tp=4, pp=1, nodes=Nodes((2, 2)))
    (problem,) = caught.value.problems
    assert problem.given == f"{tensor} 4 {stages} 1 on 2 nodes of 2 ranks"
    assert "inside one node" in problem.rule
    across = "--allow-tensor-parallel-across-nodes"
    assert problem.legal == f"{tensor} 1 {stages} 4; {tensor} 2 {stages} 2; {across}"
    assert choose_layout(MODEL, tp=2, pp=2, nodes=Nodes((2, 2))) == Topology(tp=2, pp=2)
    assert choose_layout(MODEL, tp=4, pp=1, nodes=Nodes((2, 2)), across_nodes=True) == Topology(tp=4)
    # On nodes of 5 and 3 every tensor size above 1 crosses; 8 pipeline stages are too many for 3 layers.
    with pytest.raises(TopologyError, match=f"legal: {across}$"):
        choose_layout(MODEL, tp=2, pp=4, nodes=Nodes((5, 3)))


def test_inner_elements_count_as_heads_do() -> None:
    with pytest.raises(TopologyError, match=r"legal: --tensor-model-parallel-size 3$"):
        choose_layout(small_config(ffn_hidden_size=63), tp=12, pp=1, nodes=Nodes((12,)))


def test_groups_of_heads_may_be_cut_anywhere() -> None:
    model = small_config(group_query_attention=True, num_query_groups=4)
    for tp in (1, 2, 3, 4, 6, 12):
        assert choose_layout(model, tp=tp, pp=1, nodes=Nodes((tp,))) == Topology(tp=tp)


def test_stages_are_cut_by_what_they_hold() -> None:
    """A layer's matrices have 12 h^2 elements, as many as 12 h rows of the vocabulary; positions break ties."""
    layer = 12 * 60
    assert split(4, vocab_size=10, pp=3) == [1, 2, 1]
    assert split(6, vocab_size=10, pp=3) == [2, 2, 2]
    assert split(6, vocab_size=layer, pp=2) == [3, 3]
    assert split(5, vocab_size=layer, pp=2) == [2, 3] == split(5, vocab_size=layer, pp=2, untied=True)
    assert split(6, vocab_size=3 * layer, pp=3) == [1, 4, 1]
    assert split(2, vocab_size=3 * layer, pp=4) == [0, 1, 1, 0]


def split(num_layers: int, *, vocab_size: int, pp: int, untied: bool = False) -> list[int]:
    model = small_config(num_layers=num_layers, untie_embeddings_and_output_weights=untied)
    chunks = [stage_chunks(model, vocab_size, stage=stage, layout=Topology(pp=pp)) for stage in range(pp)]
    assert [len(each) for each in chunks] == [1] * pp
    assert [index for (chunk,) in chunks for index in chunk.layers] == list(range(num_layers))
    assert [chunk.is_first for (chunk,) in chunks] == [True] + [False] * (pp - 1)
    return [len(chunk.layers) for (chunk,) in chunks]


def test_no_more_padding_than_an_even_cut_needs() -> None:
    assert [padded_rows(101, Topology(tp=tp)) for tp in (1, 2, 4)] == [101, 102, 104]
