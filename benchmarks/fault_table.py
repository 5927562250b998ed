"""The faults that `planted_faults.py` plants, in two tables.

PACKAGE_FAULTS has at least one fault in every package, which the package's tests must find.  SHARED_FAULTS are in what
a run and the library both use; each has two rows, because the tests of both doors must find it.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """A change to one file of megazero: the text `old`, which occurs there once, becomes `new`.

    file: the path below megazero/.  what: what the change makes wrong.  tests: the files one test of which must fail.
    """

    file: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        return f"megazero/{self.file}"

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


PACKAGE_FAULTS: tuple[Fault, ...] = (
    Fault(
        "activations/decision.py",
        "the gain of partitioned checkpoints forgets that a slice is left",
        "gain = saves_from * (1 - 1 / ranks)",
        "gain = saves_from",
        ("tests/activations/test_decision.py",),
    ),
    Fault(
        "activations/recompute_plan.py",
        "more layers are recomputed one by one than there are",
        "number = min(number, total)",
        "number = number + 0",
        ("tests/activations/test_recompute_plan.py",),
    ),
    Fault(
        "activations/checkpoints.py",
        "a checkpoint's slices are read before they have come",
        "        if self._work is not None:\n            self._work.wait()\n",
        "",
        ("tests/activations/test_checkpoints.py",),
    ),
    Fault(
        "checkpoint/slices.py",
        "padding counts as a part of the logical tensor",
        "max(0, min(length, free))",
        "max(0, length)",
        ("tests/checkpoint/test_slices.py",),
    ),
    Fault(
        "checkpoint/reader.py",
        "damaged bytes pass",
        "if key not in self._sound and _digest(raw) == saved.entry.sha256:",
        "if key not in self._sound:",
        ("tests/checkpoint/test_reader.py",),
    ),
    Fault(
        "checkpoint/writer.py",
        "wide elements may lie at odd addresses",
        "items.sort(key=lambda item: -item.view.element_size())",
        "items.sort(key=lambda item: item.view.element_size())",
        ("tests/checkpoint/test_writer.py",),
    ),
    Fault(
        "checkpoint/writer.py",
        "parts of another save are merged",
        "if part.save_id != saving.save_id:",
        "if False:",
        ("tests/checkpoint/test_writer.py",),
    ),
    Fault(
        "checkpoint/folder_lock.py",
        "a lock is broken by writing over it, whoever has it by then",
        "_create(successor, mine)\n",
        "_replace(path, mine)\n",
        ("tests/checkpoint/test_folder_lock.py",),
    ),
    Fault(
        "checkpoint/folders.py",
        "what other jobs are writing is removed",
        "if owner is None or not (owner == here or owner.is_gone(here)):",
        "if owner is None:",
        ("tests/checkpoint/test_writer.py",),
    ),
    Fault(
        "checkpoint/space.py",
        "a new checkpoint takes the room of the one that it replaces",
        "peak = max(peak, growth)\n        growth -= kept.get(step, 0)",
        "growth -= kept.get(step, 0)\n        peak = max(peak, growth)",
        ("tests/checkpoint/test_space.py",),
    ),
    Fault(
        "checkpoint/restore.py",
        "which parameters other ranks want is not waited for",
        'control.all_reduce_scalars(seen, "max").wait()',
        'control.all_reduce_scalars(seen, "max")',
        ("tests/checkpoint/test_restore.py",),
    ),
    Fault(
        "cluster/preflight.py",
        "the first node's clock is taken to be right",
        "middle = statistics.median_low(found.clocks)",
        "middle = found.clocks[0]",
        ("tests/cluster/test_preflight.py",),
    ),
    Fault(
        "cluster/preflight.py",
        "a node of an odd ring measures with two others at once",
        "last = edges[-1:] if count % 2 and count > 2 else []",
        "last = edges[:0]",
        ("tests/cluster/test_preflight.py",),
    ),
    Fault(
        "cluster/local_processes.py",
        "a job's status is that of the launcher, not of the rank that failed",
        "            return failure.exitcode",
        "            return 1",
        ("tests/cluster/test_local_processes.py",),
    ),
    Fault(
        "commands/convert.py",
        "an exported model has no tokenizer's end of text",
        "eod = tokenizer.eod",
        "eod = None",
        ("tests/commands/test_convert.py",),
    ),
    Fault(
        "commands/checkpoint.py",
        "checkpoints that differ are no failure",
        "return 1 if lines else 0",
        "return 0",
        ("tests/commands/test_checkpoint.py",),
    ),
    Fault(
        "comm/metered.py",
        "an all-reduce counts as half of what it sends",
        "else 2 * share",
        "else share",
        ("tests/comm/test_metered.py",),
    ),
    Fault(
        "comm/mesh.py",
        "both links of a pipeline stage share one channel",
        "_ODD * (link % 2)",
        "_ODD * 0",
        ("tests/comm/test_mesh.py",),
    ),
    Fault(
        "comm/process_group.py",
        "a rank's own share is left out of a sum",
        "        summands[self.rank].copy_(slices[self.rank])\n",
        "",
        ("tests/comm/test_process_group.py",),
    ),
    Fault(
        "config/validate.py",
        "a negated flag sets what it negates",
        'not value if raw.name == f"no_{info.name}" else value',
        "value",
        ("tests/config/test_validate.py",),
    ),
    Fault(
        "command_line/parse.py",
        "words that follow no flag pass in silence",
        "gathered.problems.extend(_unexpected(stray))",
        "list(_unexpected(stray))",
        ("tests/command_line/test_parse.py",),
    ),
    Fault(
        "config/derived.py",
        "the vocabulary is cut to a multiple, not filled up",
        "return -(-vocab_size // multiple) * multiple",
        "return vocab_size // multiple * multiple",
        ("tests/config/test_derived.py",),
    ),
    Fault(
        "config/batch.py",
        "a batch that does not divide is accepted",
        "    if train % fixed:\n",
        "    if train % (micro or 1):\n",
        ("tests/config/test_batch.py",),
    ),
    Fault(
        "data/permutation.py",
        "two numbers have one image",
        "found[outside] = self._pass(found[outside])",
        "found[outside] %= self.size",
        ("tests/data/test_permutation.py",),
    ),
    Fault(
        "data/samples.py",
        "the last label of an epoch lies behind the corpus",
        "max(0, self.num_tokens - 1) // seq_length",
        "max(0, self.num_tokens) // seq_length",
        ("tests/data/test_samples.py",),
    ),
    Fault(
        "data/loader.py",
        "the token that ends a document belongs to the next one",
        "begins[:, 1:] = tokens[:, :-1] == layout.document_end",
        "begins[:] = tokens == layout.document_end",
        ("tests/data/test_loader.py",),
    ),
    Fault(
        "dialects/deepspeed/sections.py",
        "communication overlaps in every stage unless told",
        'value = settings["zero_stage"].value == 3',
        "value = True",
        ("tests/dialects/deepspeed/test_sections.py",),
    ),
    Fault(
        "generate/sampling.py",
        "top-p keeps a token more than it takes",
        "before >= top_p",
        "before > top_p",
        ("tests/generate/test_sampling.py",),
    ),
    Fault(
        "generate/session.py",
        "the chosen tokens are read before they have come",
        "self._mesh.world.broadcast(chosen, self._chooser).wait()",
        "self._mesh.world.broadcast(chosen, self._chooser)",
        ("tests/generate/test_session.py",),
    ),
    Fault(
        "library/step/stepping.py",
        "accumulated gradients are summed, not averaged",
        "(self.accumulation * self._num_summed * self.loss_scale)",
        "(self._num_summed * self.loss_scale)",
        ("tests/library/step/test_stepping.py",),
    ),
    Fault(
        "deepspeed/engine.py",
        "a script's own schedule is not stepped",
        "if self._advances and self.core.was_step_applied():",
        "if False:",
        ("tests/deepspeed/test_engine.py",),
    ),
    Fault(
        "library/module/tiled_linear.py",
        "every tile of a row adds the bias",
        "bias=bias and index == last",
        "bias=bias",
        ("tests/library/module/test_tiled_linear.py",),
    ),
    Fault(
        "memory/fused_buffers.py",
        "one buffer is lent twice",
        "storage = self._free.pop()",
        "storage = self._free[-1]",
        ("tests/memory/test_fused_buffers.py",),
    ),
    Fault(
        "memory/arena.py",
        "a tensor whose block has moved shows the old place",
        "            self._point(self._tensors[block], block)\n",
        "",
        ("tests/memory/test_arena.py",),
    ),
    Fault(
        "model/gpt.py",
        "a position attends to those behind it",
        "is_causal=sequences.mask is None",
        "is_causal=False",
        ("tests/model/test_gpt.py",),
    ),
    Fault(
        "model/gpt.py",
        "only one of a layer's two output matrices is counted",
        "math.sqrt(2.0 * config.num_layers)",
        "math.sqrt(1.0 * config.num_layers)",
        (
            "tests/model/test_initial_values.py",
            "tests/model/test_gpt.py",
        ),
    ),
    Fault(
        "optim/loss_scaler.py",
        "the loss scale grows a step late",
        "if state.good_steps + 1 < self.window:",
        "if state.good_steps < self.window:",
        ("tests/optim/test_loss_scaler.py",),
    ),
    Fault(
        "optim/schedules.py",
        "the decay takes the warm-up for a part of itself",
        "remaining((updates - start) / (end - start))",
        "remaining(updates / (end - start))",
        ("tests/optim/test_schedules.py",),
    ),
    Fault(
        "parallel/topology.py",
        "the rank order is that of the axes",
        "self.order[self.order.index(axis) + 1 :]",
        "AXES[AXES.index(axis) + 1 :]",
        ("tests/parallel/test_topology.py",),
    ),
    Fault(
        "parallel/layer_split.py",
        "the vocabulary head costs nothing",
        "    costs[last] += head_cost\n",
        "",
        ("tests/parallel/test_layer_split.py",),
    ),
    Fault(
        "pipeline/exchange.py",
        "one more send is waited for than its receiver is known to have taken",
        "        while self._num_released[kind] < number:\n",
        "        while self._sent[kind] and self._num_released[kind] < number + 1:\n",
        ("tests/pipeline/test_exchange.py",),
    ),
    Fault(
        "pipeline/stage_plan.py",
        "a split backward proves nothing about gradients",
        "_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)",
        "_BACKWARDS = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)",
        ("tests/pipeline/test_stage_plan.py",),
    ),
    Fault(
        "pipeline/schedule.py",
        "an interleaved stage warms up too briefly",
        "return (v - 1) * p + 2 * following",
        "return (v - 1) * p + following",
        ("tests/pipeline/test_schedule.py",),
    ),
    Fault(
        "prepare/tokens/encode.py",
        "a document without tokens is as long as its end",
        "lengths[lengths > 0] += 1",
        "lengths += 1",
        ("tests/prepare/tokens/test_encode.py",),
    ),
    Fault(
        "prepare/clean/deduplication.py",
        "only the first of several documents with one key is found",
        'stops = np.searchsorted(self._keys, wanted, side="right")',
        'stops = np.minimum(starts + 1, np.searchsorted(self._keys, wanted, side="right"))',
        ("tests/prepare/clean/test_deduplication.py",),
    ),
    Fault(
        "report/metrics.py",
        "attention takes no time",
        "return 6 * matmul_parameters(config, vocab_size=vocab_size) + attention",
        "return 6 * matmul_parameters(config, vocab_size=vocab_size) + 0 * attention",
        ("tests/report/test_metrics.py",),
    ),
    Fault(
        "report/metrics.py",
        "short steps count as much as long ones",
        "_over_time([step.tokens_per_second * step.step_seconds for step in steps], seconds)",
        "_over_time([step.tokens_per_second for step in steps], len(steps))",
        ("tests/report/test_metrics.py",),
    ),
    Fault(
        "rules/pipeline.py",
        "stages that need no layer are not offered",
        "fitting = [size for size in range(1, layers + 3)",
        "fitting = [size for size in range(1, layers + 1)",
        ("tests/rules/test_pipeline.py",),
    ),
    Fault(
        "rules/moot.py",
        "settings of ZeRO stage 3 pass in silence below it",
        "if s.zero.zero_stage == 3 else",
        "if s.zero.zero_stage > 0 else",
        ("tests/rules/test_moot.py",),
    ),
    Fault(
        "tensor_parallel/regions.py",
        "what comes into a region is read before it has come",
        "        self._work.wait()\n        return self._tensor\n",
        "        return self._tensor\n",
        ("tests/tensor_parallel/test_regions.py",),
    ),
    Fault(
        "tensor_parallel/vocab.py",
        "a rank adds a row for tokens of other ranks",
        "found.masked_fill(elsewhere.unsqueeze(-1), 0.0)",
        "found.masked_fill(elsewhere.unsqueeze(-1) & False, 0.0)",
        ("tests/tensor_parallel/test_vocab.py",),
    ),
    Fault(
        "tensor_parallel/head_loss.py",
        "a later micro-batch overwrites the head's gradient",
        "if slot is not None and slot.is_first and slot.tensor.dtype",
        "if slot is not None and slot.tensor.dtype",
        ("tests/tensor_parallel/test_head_loss.py",),
    ),
    Fault(
        "train/evaluate.py",
        "every batch of an evaluation has samples of the first",
        "first = index * held_out.layout.global_batch_size",
        "first = index",
        ("tests/train/test_evaluate.py",),
    ),
    Fault(
        "train/saving.py",
        "optimizer states are saved where only weights are wanted",
        "fragments = saved_fragments(self.engine, with_optimizer=self.with_optimizer)\n        return",
        "fragments = saved_fragments(self.engine)\n        return",
        ("tests/train/test_saving.py",),
    ),
    Fault(
        "verify/verdict.py",
        "a difference that is no number agrees",
        "if self.scale and math.isfinite(self.largest) else math.inf",
        "if self.scale and math.isfinite(self.largest) else 0.0",
        ("tests/verify/test_verdict.py",),
    ),
    Fault(
        "verify/side_by_side.py",
        "tensors are compared before their parts have come",
        "self._mesh.world.all_reduce(found).wait()",
        "self._mesh.world.all_reduce(found)",
        ("tests/verify/test_side_by_side.py",),
    ),
    Fault(
        "zero/engine.py",
        "an update writes to parameters that are still being published",
        "        self._publisher.ensure_all()  # of units that no forward has used since the step before\n",
        "",
        ("tests/zero/test_engine.py",),
    ),
    Fault(
        "zero/engine.py",
        "gathered copies outlive new master weights",
        "        self._gather.release_all()\n        self._update.publish_masters(section.buckets)\n",
        "        self._update.publish_masters(section.buckets)\n",
        ("tests/zero/test_engine.py",),
    ),
    Fault(
        "zero/reduce.py",
        "gradients are not divided before they are summed",
        "            whole.div_(self.predivisor)\n",
        "            pass\n",
        ("tests/zero/test_reduce.py",),
    ),
    Fault(
        "zero/reduce.py",
        "one more reduction is in flight",
        "while len(self._in_flight) >= max(self._max_in_flight, 1):",
        "while len(self._in_flight) > max(self._max_in_flight, 1):",
        ("tests/zero/test_reduce.py",),
    ),
    Fault(
        "zero/reduce.py",
        "the second half of stage 0's all-reduce is not waited for",
        "            self._gathering.pop().wait()\n",
        "            self._gathering.pop()\n",
        ("tests/zero/test_reduce.py",),
    ),
    Fault(
        "zero/reduce.py",
        "a reduction is not waited for",
        "        work.wait()\n        self._store.finish(bucket, within, reduced)\n",
        "        self._store.finish(bucket, within, reduced)\n",
        ("tests/zero/test_reduce.py",),
    ),
    Fault(
        "zero/reduce.py",
        "a partition is taken from the wrong place of its bucket",
        "mine = whole[partition.start - bucket.start : partition.stop - bucket.start]",
        "mine = whole[: partition.numel]",
        ("tests/zero/test_reduce.py",),
    ),
    Fault(
        "zero/reduce.py",
        "buckets of parameters without a gradient are left over",
        "        while self._next >= 0:\n            self._launch()\n        self._arrived",
        "        self._arrived",
        ("tests/zero/test_reduce.py",),
    ),
    Fault(
        "zero/unreduced.py",
        "a later micro-batch overwrites the sums of those before",
        "target.add_(reduced)",
        "target.copy_(reduced)",
        ("tests/zero/test_reduce.py",),
    ),
    Fault(
        "zero/unreduced.py",
        "what was reduced in another number format is thrown away",
        "            self._shards.resident_gradient(bucket, within).copy_(reduced)\n",
        "",
        ("tests/zero/test_reduce.py",),
    ),
    Fault(
        "zero/sums.py",
        "small pieces that are summed together stay as they were",
        "        for arrival in [home.store(*copy) for home, *copy in zip(homes, gradients, places, strict=True)]:\n"
        "            arrival.finish()\n",
        "",
        ("tests/zero/test_sums.py",),
    ),
    Fault(
        "zero/publish.py",
        "updated partitions are gathered before they have come from host memory",
        "            arrival.wait()\n",
        "            pass\n",
        ("tests/zero/test_offload.py",),
    ),
    Fault(
        "zero/unit_memory.py",
        "a partition is gathered before it has come from host memory",
        "with torch.no_grad(), arrival.ahead():",
        "with torch.no_grad():",
        ("tests/zero/test_offload.py",),
    ),
    Fault(
        "zero/unreduced.py",
        "norms are taken before gradients have come to host memory",
        "            departure.arrival.finish()\n            self._release(departure)\n",
        "            if departure.lease is not None:\n                departure.lease.release()\n",
        ("tests/zero/test_offload.py",),
    ),
    Fault(
        "zero/unreduced.py",
        "a buffer is leased again while its sums leave",
        "        departure.arrival.wait()\n        if departure",
        "        if departure",
        ("tests/zero/test_offload.py",),
    ),
    Fault(
        "zero/unreduced.py",
        "sums of earlier micro-batches are added before they have come back",
        "home.load(total.tensor, target).wait()",
        "home.load(total.tensor, target)",
        ("tests/zero/test_offload.py",),
    ),
    Fault(
        "zero/shards.py",
        "a share of buckets beyond the ratio leaves the device",
        "goes = away + bucket.numel / 2 <= self.plan.share_at_home * total",
        "goes = away <= self.plan.share_at_home * total + bucket.numel",
        ("tests/zero/test_offload.py",),
    ),
    Fault(
        "zero/publish.py",
        "a unit's parameters may be read while they are on their way",
        "                for work in works:\n                    work.wait()\n",
        "                pass\n",
        ("tests/zero/test_publish.py",),
    ),
)


def at_both_doors(file: str, what: str, old: str, new: str, *, run: str, library: str) -> tuple[Fault, Fault]:
    """Return two rows of one fault: for a test file of a run, and for one of the library."""
    return Fault(file, f"{what}, in a run", old, new, (run,)), Fault(
        file, f"{what}, in the library", old, new, (library,)
    )


SHARED_FAULTS: tuple[Fault, ...] = (
    *at_both_doors(
        "zero/step.py",
        "gradients are clipped by the norm of their sums, not of their averages",
        "grad_norm = reduced.square.sqrt() * scale",
        "grad_norm = reduced.square.sqrt()",
        run="tests/train/test_step.py",
        library="tests/library/step/test_stepping.py",
    ),
    *at_both_doors(
        "config/optimizers.py",
        "Adadelta averages over longer than torch does",
        'parameter("rho", "float", 0.9, ge=0, le=1)',
        'parameter("rho", "float", 0.95, ge=0, le=1)',
        run="tests/train/test_optimizers.py",
        library="tests/library/test_optimizers.py",
    ),
    *at_both_doors(
        "config/schedules.py",
        "a warm-up of DeepSpeed's is shorter unless told",
        '"warmup_num_steps", "int", 1000,',
        '"warmup_num_steps", "int", 100,',
        run="tests/command_line/test_deepspeed_files.py",
        library="tests/library/test_config.py",
    ),
    *at_both_doors(
        "optim/schedules.py",
        "the decay takes the warm-up for a part of itself",
        "remaining((updates - start) / (end - start))",
        "remaining(updates / (end - start))",
        run="tests/train/test_loop.py",
        library="tests/library/step/test_stepping.py",
    ),
    *at_both_doors(
        "config/values.py",
        "a fraction is cut to a whole number",
        'if number is None or (info.kind == "int" and number != int(number)):',
        "if number is None:",
        run="tests/command_line/test_one_grammar.py",
        library="tests/library/test_one_grammar.py",
    ),
    *at_both_doors(
        "dialects/deepspeed/sections.py",
        "the power of the first loss scale is taken for half of it",
        "return 2.0**value if",
        "return 2.0 * value if",
        run="tests/command_line/test_deepspeed_files.py",
        library="tests/library/test_deepspeed_files.py",
    ),
    *at_both_doors(
        "dialects/deepspeed/sections.py",
        "communication overlaps in every stage unless told",
        'value = settings["zero_stage"].value == 3',
        "value = True",
        run="tests/command_line/test_deepspeed_files.py",
        library="tests/library/test_deepspeed_files.py",
    ),
    *at_both_doors(
        "dialects/deepspeed/keys.py",
        "two keys of checkpointing are mixed up",
        '"contiguous_checkpointing": "activation_checkpointing.contiguous_memory_optimization"',
        '"contiguous_checkpointing": "activation_checkpointing.synchronize_checkpoint_boundary"',
        run="tests/command_line/test_deepspeed_files.py",
        library="tests/library/test_deepspeed_files.py",
    ),
)

FAULTS = (*PACKAGE_FAULTS, *SHARED_FAULTS)
