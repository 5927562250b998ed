"""The rows of `wrong_invocations.py`: command lines that a user may type by mistake, and files given by mistake.

A row is a command as a shell would read it: variables, a program, its words.  `pretrain` stands for pretrain_gpt.py,
`verify` for `python -m megazero`, a tool for its file, `library` for Python that calls megazero, a `.sh` for a script;
{small} for the flags of a small good run.  The words expected in the message follow, separated by " | ".
"""

import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-3 --eval-iters 0"
STEPS = "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr-decay-style constant --device cpu"
SMALL = f"{MODEL} {STEPS} --vocab-size 300 --mock-data"
CORPUS = f"{MODEL} {STEPS} --split 1 --data-path"  # followed by a prefix
BYTES = "--tokenizer-type ByteTokenizer"
ENCODE = "preprocess_data --input corpus.jsonl --output-prefix out"
SHORT: Mapping[str, str] = MappingProxyType(
    {
        "{small}": SMALL,
        "{corpus}": CORPUS,
        "{bytes}": BYTES,
        "{encode}": ENCODE,
        "{gpt2}": "--tokenizer-type GPT2BPETokenizer",
        "{soon}": "--distributed-join-timeout-minutes 0.05",
        "{two}": "WORLD_SIZE=2 MASTER_ADDR=127.0.0.1",
    }
)


class Row(NamedTuple):
    """A wrong invocation, and the parts of its message."""

    command: str
    told: tuple[str, ...]

    def words(self) -> str:
        """Return the command with what short forms stand for."""
        return functools.reduce(lambda text, short: text.replace(*short), SHORT.items(), self.command)


# Text files of the folder in which commands run, beside those that `wrong_invocations.py` makes with the tools.
FILES: Mapping[str, str] = MappingProxyType(
    {
        "empty": "",
        "notes.jsonl": '{"shopping": "milk"}\n',
        "numbers.jsonl": '{"text": 5}\n',
        "broken.jsonl": '{"text": "a"}\n{"text": \n',
        "other_key.jsonl": '{"body": "a text"}\n',
        "list.yaml": "- hidden_size\n- 32\n",
        "scalar.yaml": "32\n",
        "tabs.yaml": "num_layers:\t2\n\thidden_size: 32\n",
        "twice.yaml": "num_layers: 2\nnum_layers: 4\n",
        "unknown.yaml": "num_layers: 2\nhiden_size: 32\n",
        "wrong_type.yaml": "num_layers: [2]\nlr: {a: 1}\nseed: yes\n",
        "tagged.yaml": "num_layers: !!python/object/apply:os.system ['touch tagged']\n",
        "null.yaml": "num_layers: null\nhidden_size: ~\n",
        "list.json": "[]",
        "broken.json": '{"zero_optimization": {"stage": 2}',
        "unknown.json": '{"zero_optimisation": {"stage": 2}}',
        "stage9.json": '{"zero_optimization": {"stage": 9}}',
        "text_stage.json": '{"zero_optimization": {"stage": "two"}}',
        "two_precisions.json": '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}',
        "batch.json": '{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}',
        "section.json": '{"zero_optimization": 3}',
        "nan.json": '{"gradient_clipping": NaN}',
        "optimizer.json": '{"optimizer": {"type": "Lion9", "params": {"lr": 1e-3}}}',
        "vocab.json": '{"a": 0, "b": 1}',
        "merges.txt": "#version: 0.2\na b c\n",
        "vocab_list.json": '["a", "b"]',
        "folder/file": "kept\n",
        "no_model/config.json": '{"model_type": "llama"}',
        "half_model/config.json": '{"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 8}',
        "bad_model/config.json": '{"model_type": ',
        "other_latest/latest": "step_0000009\n",
        "empty_latest/latest": "",
        "wild_latest/latest": "../../etc\n",
        "no_manifest/step_0000001/rank_00000.safetensors": "x",
        "bad_manifest/step_0000001/manifest.json": "{",
    }
)

_PRETRAIN = """
pretrain                                                      => --num-layers is missing
pretrain {small} --num-layers 0                               => --num-layers 0 | at least 1
pretrain {small} --num-layers -3                              => --num-layers -3 | at least 1
pretrain {small} --num-layers 2.5                             => --num-layers 2.5 | whole number
pretrain {small} --num-layers 1e3x                            => --num-layers 1e3x | whole number
pretrain {small} --num-layers ''                              => --num-layers | whole number
pretrain {small} --hidden-size 33                             => --hidden-size 33 | divides hidden_size
pretrain {small} --hidden-size 99999999999999999999           => --hidden-size
pretrain {small} --num-attention-heads 0                      => --num-attention-heads 0
pretrain {small} --seq-length 0                               => --seq-length 0 | at least 1
pretrain {small} --max-position-embeddings 4                  => --seq-length 16 | max_position_embeddings
pretrain {small} --vocab-size -1                              => --vocab-size -1
pretrain {small} --micro-batch-size 3                         => --global-batch-size 4
pretrain {small} --global-batch-size 0                        => --global-batch-size 0
pretrain {small} --train-iters 0                              => --train-iters 0
pretrain {small} --train-samples 100                          => --train-samples
pretrain {small} --lr nan                                     => --lr nan
pretrain {small} --lr inf                                     => --lr inf
pretrain {small} --lr -1e-3                                   => --lr -1e-3 | greater than 0
pretrain {small} --lr 1,5e-3                                  => --lr 1,5e-3
pretrain {small} --min-lr 5                                   => --min-lr 5 | at most lr
pretrain {small} --lr-decay-style linaer                      => --lr-decay-style linaer | linear
pretrain {small} --lr-warmup-iters -1                         => --lr-warmup-iters -1
pretrain {small} --lr-warmup-fraction 2                       => --lr-warmup-fraction 2
pretrain {small} --weight-decay -1                            => --weight-decay -1
pretrain {small} --adam-beta1 1                               => --adam-beta1 1 | less than 1
pretrain {small} --adam-eps 0                                 => --adam-eps 0
pretrain {small} --clip-grad -1                               => --clip-grad -1
pretrain {small} --hidden-dropout 1                           => --hidden-dropout 1 | less than 1
pretrain {small} --attention-dropout -0.1                     => --attention-dropout -0.1
pretrain {small} --seed 4294967296                            => --seed 4294967296 | less than
pretrain {small} --seed abc                                   => --seed abc | whole number
pretrain {small} --zero-stage 4                               => --zero-stage 4 | legal: --zero-stage 3
pretrain {small} --zero-stage two                             => --zero-stage two
pretrain {small} --bf16 --fp16                                => --bf16 and --fp16
pretrain {small} --precision int8                             => --precision int8 | bf16
pretrain {small} --loss-scale 0                               => --loss-scale 0
pretrain {small} --tensor-model-parallel-size 3               => --tensor-model-parallel-size 3
pretrain {small} --tensor-model-parallel-size 2               => 1 process | --tensor-model-parallel-size 2
pretrain {small} --pipeline-model-parallel-size 2             => --pipeline-model-parallel-size 2
pretrain {small} --pipeline-split 1,1                         => --pipeline-split 1,1
pretrain {small} --context-parallel-size 2                    => --context-parallel-size
pretrain {small} --num-experts 8                              => --num-experts
pretrain {small} --swiglu --squared-relu                      => --squared-relu
pretrain {small} --position-embedding-type relative           => --position-embedding-type
pretrain {small} --group-query-attention --num-query-groups 3 => --num-query-groups
pretrain {small} --optimizer sgdd                             => --optimizer sgdd
pretrain {small} --optimizer-params lr                        => --optimizer-params
pretrain {small} --zero-stge 2                                => --zero-stge | --zero-stage
pretrain {small} --Zero-Stage 2                               => --Zero-Stage
pretrain {small} -zero-stage 2                                => -zero-stage
pretrain {small} zero-stage 2                                 => zero-stage
pretrain {small} --num-layers                                 => --num-layers | needs a value
pretrain {small} --num-layers 2 4                             => 4
pretrain {small} --bf16 yes please                            => --bf16
pretrain {small} --preset gpt2-125m                           => --preset gpt2-125m | gpt2-124m
pretrain {small} --zero-config C9                             => --zero-config C9 | C1
pretrain {small} --reduce-bucket-size 5GiB                    => --reduce-bucket-size
pretrain {small} --stage3-max-live-parameters 10              => --stage3-max-live-parameters 10 | --zero-stage 3
pretrain {small} --recompute-granularity half                 => --recompute-granularity half
pretrain {small} --recompute-num-layers 3                     => --recompute-num-layers 3
pretrain {small} --device gpu                                 => --device gpu | cuda
pretrain {small} --device cuda                                => --device cuda
pretrain {small} --distributed-backend mpi                    => --distributed-backend mpi
pretrain {small} --distributed-backend nccl                   => --distributed-backend nccl
pretrain {small} --distributed-timeout-minutes 0              => --distributed-timeout-minutes 0
pretrain {small} --cpu-threads 0                              => --cpu-threads 0
pretrain {small} --exit-status-when-stopped 1                 => --exit-status-when-stopped 1
pretrain {small} --exit-duration-in-mins -1                   => --exit-duration-in-mins -1
pretrain {small} --log-interval 0                             => --log-interval 0
pretrain {small} --save-interval 0 --save out                 => --save-interval 0
pretrain {small} --finetune                                   => --finetune
pretrain {small} --eval-iters -1                              => --eval-iters -1
pretrain {small} --data-path text                             => --data-path | --mock-data
pretrain {small} --split 1,2,3,4                              => --split
pretrain {small} --attention-backend fast                     => --attention-backend fast
pretrain {small} --compile maybe                              => --compile maybe
"""
_PLACES = """
pretrain {small} --save empty                                 => --save empty | a file is there
pretrain {small} --save fifo                                  => --save fifo
pretrain {small} --save dangling/out                          => dangling/out
pretrain {small} --save loop                                  => loop
pretrain {small} --save /dev/null                             => --save /dev/null
pretrain {small} --save /proc/1/out                           => /proc/1/out
pretrain {small} --load empty                                 => empty
pretrain {small} --load fifo                                  => fifo
pretrain {small} --load /dev/null                             => /dev/null
pretrain {small} --load saved/step_0000009                    => saved/step_0000009 | step_0000002
pretrain {small} --load other_latest                          => other_latest
pretrain {small} --load empty_latest                          => empty_latest
pretrain {small} --load wild_latest                           => wild_latest
pretrain {small} --load no_manifest                           => no_manifest
pretrain {small} --load bad_manifest/step_0000001             => bad_manifest
pretrain {small} --load saved --save out --seed 7             => --seed 7 | --finetune
pretrain {small} --load saved --save out --num-layers 3       => --num-layers 3 | saved with 2
pretrain {small} --load saved --save out --seq-length 8       => --seq-length 8
pretrain {small} --load saved --save out --vocab-size 600     => --vocab-size 600
pretrain {small} --load saved --save out --optimizer sgd      => --optimizer
pretrain {small} --config                                     => --config
pretrain {small} --config missing.yaml                        => missing.yaml
pretrain {small} --config empty_folder                        => empty_folder
pretrain {small} --config fifo                                => fifo
pretrain {small} --config binary                              => binary
pretrain {small} --config list.yaml                           => list.yaml
pretrain {small} --config scalar.yaml                         => scalar.yaml
pretrain {small} --config tabs.yaml                           => tabs.yaml
pretrain {small} --config twice.yaml                          => twice.yaml | num_layers
pretrain {small} --config unknown.yaml                        => hiden_size | --hidden-size
pretrain {small} --config wrong_type.yaml                     => num_layers
pretrain {small} --config tagged.yaml                         => tagged.yaml
pretrain --config null.yaml                                   => num_layers
pretrain {small} --deepspeed_config missing.json              => missing.json
pretrain {small} --deepspeed_config folder                    => folder
pretrain {small} --deepspeed_config fifo                      => fifo
pretrain {small} --deepspeed_config binary                    => binary
pretrain {small} --deepspeed_config empty                     => empty
pretrain {small} --deepspeed_config list.json                 => list.json
pretrain {small} --deepspeed_config broken.json               => broken.json
pretrain {small} --deepspeed_config unknown.json              => zero_optimisation
pretrain {small} --deepspeed_config stage9.json               => stage
pretrain {small} --deepspeed_config text_stage.json           => stage
pretrain {small} --deepspeed_config two_precisions.json       => fp16
pretrain {small} --deepspeed_config batch.json                => train_batch_size
pretrain {small} --deepspeed_config section.json              => zero_optimization
pretrain {small} --deepspeed_config nan.json                  => NaN | finite
pretrain {small} --metrics-file folder                        => folder
pretrain {small} --metrics-file notes.jsonl                   => notes.jsonl
pretrain {small} --metrics-file empty/steps                   => empty/steps
pretrain {small} --metrics-file fifo                          => fifo
pretrain {small} --tensorboard-dir empty                      => --tensorboard-dir empty
pretrain {small} --tensorboard-dir /proc/1/board              => /proc/1/board
pretrain {corpus} missing                                     => missing | text
pretrain {corpus} text.bin                                    => text.bin
pretrain {corpus} folder                                      => folder
pretrain {corpus} text_cut                                    => text_cut.bin
pretrain {corpus} text_fifo                                   => text_fifo
pretrain {corpus} text_binary                                 => text_binary.idx
pretrain {corpus} text_empty                                  => text_empty.idx
pretrain {corpus} -1 text 2 text                              => -1
pretrain {corpus} text --vocab-size 100                       => --vocab-size is 100 | --vocab-size 257
pretrain {corpus} text --seq-length 9000                      => sample
pretrain {corpus} s3://bucket/none                            => s3://bucket/none
pretrain {corpus} text {gpt2}      => --vocab-file
pretrain {corpus} text --tokenizer-type Word                  => --tokenizer-type Word
"""
_ENVIRONMENT = """
RANK=a pretrain {small}                                       => RANK
RANK=1 pretrain {small}                                       => RANK 1
RANK=-1 WORLD_SIZE=2 pretrain {small}                         => RANK -1
RANK=0 WORLD_SIZE=0 pretrain {small}                          => WORLD_SIZE 0
RANK=0 WORLD_SIZE=2 LOCAL_RANK=x pretrain {small}             => LOCAL_RANK
RANK=0 WORLD_SIZE=2 pretrain {small}                          => MASTER_ADDR | torchrun
RANK=0 {two} pretrain {small}    => MASTER_PORT
RANK=0 {two} MASTER_PORT=http pretrain {small}     => http
RANK=0 {two} MASTER_PORT=99999 pretrain {small}    => 99999
RANK=0 {two} MASTER_PORT=-1 pretrain {small}       => -1
RANK=1 WORLD_SIZE=2 MASTER_ADDR=no-such.invalid MASTER_PORT=29877 pretrain {small} {soon} => no-such.invalid
RANK=1 {two} MASTER_PORT=29877 pretrain {small} {soon} => 29877
RANK=0 {two} MASTER_PORT=29878 pretrain {small} {soon} => rank 1 of 2 did not join
SLURM_PROCID=x SLURM_STEP_NUM_TASKS=4 pretrain {small}        => SLURM_PROCID
SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=4 pretrain {small}        => SLURM_PROCID 5
CUDA_VISIBLE_DEVICES= pretrain {small} --device cuda          => --device cuda
CUDA_VISIBLE_DEVICES=99 pretrain {small} --device cuda        => --device cuda
OMP_NUM_THREADS=many pretrain {small} --seed no               => --seed no
"""
_TOOLS = """
verify                                                        => verify-layout
verify verify-layuot                                          => verify-layuot | verify-layout
verify verify-layout                                          => --num-layers
verify verify-layout {small} --verify-steps 0                 => --verify-steps 0
verify verify-layout {small} --verify-steps                   => --verify-steps
verify verify-layout {small} --zero-stage 5                   => --zero-stage 5
text_to_jsonl                                                 => --output
text_to_jsonl --output out.jsonl                              => --input
text_to_jsonl --input missing --output out.jsonl              => missing
text_to_jsonl --input empty_folder --output out.jsonl         => empty_folder
text_to_jsonl --input folder --glob '*.xyz' --output out.jsonl  => folder
text_to_jsonl --input folder --output empty_folder            => empty_folder
text_to_jsonl --input folder --output out.jsonl --separator '' => --separator
clean_corpus --input missing.jsonl --output out.jsonl         => missing.jsonl
clean_corpus --input corpus.jsonl --output empty_folder       => empty_folder
clean_corpus --input corpus.jsonl --output corpus.jsonl       => corpus.jsonl
clean_corpus --input corpus.jsonl --output out.jsonl --min-characters -1 => --min-characters -1
clean_corpus --input corpus.jsonl --output out.jsonl --deduplicate never => --deduplicate
clean_corpus --input corpus.jsonl --output out.jsonl --languages xx      => xx
clean_corpus --input broken.jsonl --output out.jsonl          => broken.jsonl
train_tokenizer --input missing.jsonl --output out.model      => missing.jsonl
train_tokenizer --input corpus.jsonl --output out.model --vocab-size 5   => --vocab-size 5
train_tokenizer --input corpus.jsonl --output out.model --vocab-size 999999 => --vocab-size 999999
train_tokenizer --input empty --input-format jsonl --output out.model    => empty
train_tokenizer --input corpus.jsonl --output empty_folder    => empty_folder
train_tokenizer --input corpus.jsonl --output out.model --model-type lstm => --model-type
{encode}      => --tokenizer-type
preprocess_data --input missing.jsonl --output-prefix out {bytes}        => missing.jsonl
preprocess_data --input folder --output-prefix out {bytes}    => folder
preprocess_data --input broken.jsonl --output-prefix out {bytes}         => broken.jsonl | 2
preprocess_data --input numbers.jsonl --output-prefix out {bytes}        => numbers.jsonl
preprocess_data --input other_key.jsonl --output-prefix out {bytes}      => text | body
preprocess_data --input corpus.jsonl --output-prefix empty/out {bytes}   => empty/
{encode} {bytes} --workers 0      => --workers 0
{encode} {bytes} --shard-index 0  => --num-shards
{encode} {bytes} --shard-index 8 --num-shards 8 => 8
{encode} {bytes} --shards-from-slurm => SLURM_ARRAY_TASK_ID
{encode} --tokenizer-type Word => Word
{encode} --tokenizer-type SentencePieceTokenizer => --tokenizer-model
{encode} --tokenizer-type SentencePieceTokenizer --tokenizer-model binary => binary
{encode} {gpt2} --vocab-file vocab.json --merge-file merges.txt => vocab.json | 256 byte symbols
{encode} {gpt2} --vocab-file vocab_list.json --merge-file merges.txt => vocab_list.json
preprocess_data --input binary --input-format jsonl --output-prefix out {bytes}   => binary
merge_datasets --input missing --output-prefix out            => missing
merge_datasets --input text --output-prefix text              => text
merge_datasets --input text folder --output-prefix out        => folder
merge_datasets --output-prefix out                            => --input
inspect_dataset missing                                       => missing
inspect_dataset text.bin                                      => text.bin
inspect_dataset text --document 999999                        => --document 999999
inspect_dataset text --compare missing                        => missing
inspect_dataset text --picture empty_folder                   => empty_folder
inspect_dataset text_binary --verify                          => text_binary.idx
generate_text                                                 => --load
generate_text --load missing                                  => missing
generate_text --load empty                                    => empty
generate_text --load saved --max-new-tokens 0                 => --max-new-tokens 0
generate_text --load saved --temperature -1                   => --temperature -1
generate_text --load saved --top-p 0                          => --top-p 0
generate_text --load saved --prompt a                         => --tokenizer-type
generate_text --load saved --step 77                          => 77
generate_text --load saved {bytes} --tensor-model-parallel-size 2 => --tensor-model-parallel-size 2
generate_text --load saved {bytes} --batch-size 0              => --batch-size 0
generate_text --load saved {bytes} --prompts-file missing     => missing
generate_text --load saved {bytes} --prompts-file binary      => binary | UTF-8
generate_text --load saved {bytes} --stop ''                  => --stop
generate_text --load saved {bytes} --output binary            => --output binary
preflight --gpus-per-node many                                => --gpus-per-node many
preflight --min-bandwidth -1                                  => --min-bandwidth -1
preflight --device gpu                                        => --device
checkpoint                                                    => command
checkpoint inspekt saved                                      => inspekt
checkpoint inspect missing                                    => missing
checkpoint verify empty                                       => empty
checkpoint verify empty_folder                                => empty_folder
checkpoint verify saved --step 9                              => 9
checkpoint diff saved                                         => second
checkpoint diff saved missing                                 => missing
checkpoint inspect bad_manifest/step_0000001                  => manifest.json
convert_hf export --load missing --output out                 => missing
convert_hf export --load saved --output folder                => folder
convert_hf export --load saved --output out --dtype int4      => --dtype
convert_hf import --input missing --save out                  => missing
convert_hf import --input no_model --save out                 => num_attention_heads is missing
convert_hf import --input half_model --save out               => half_model
convert_hf import --input bad_model --save out                => bad_model
summarize_run                                                 => --metrics-file
summarize_run --metrics-file missing                          => missing
summarize_run --metrics-file notes.jsonl                      => notes.jsonl
summarize_run --metrics-file folder                           => folder
summarize_run --metrics-file binary                           => binary
"""
_SCRIPTS = """
scripts/launch_node.sh                                        => NUM_NODES is not set
NUM_NODES=two NODE_RANK=0 MASTER_ADDR=a scripts/launch_node.sh  => NUM_NODES=two
NUM_NODES=2 NODE_RANK=2 MASTER_ADDR=a scripts/launch_node.sh  => NODE_RANK=2
NUM_NODES=1 NODE_RANK=0 MASTER_ADDR=a MASTER_PORT=http scripts/launch_node.sh => MASTER_PORT=http
NUM_NODES=1 NODE_RANK=0 MASTER_ADDR=a PYTHON=no-python scripts/launch_node.sh => no-python
scripts/quickstart.sh --train-iters many                      => --train-iters many
scripts/quickstart.sh --input missing.jsonl                   => missing.jsonl
scripts/quickstart.sh --input empty                           => empty
scripts/quickstart.sh --input                                 => --input needs a value
scripts/quickstart.sh --fast                                  => --fast
scripts/slurm/pretrain.sbatch --config run.yaml               => batch script
scripts/slurm/preprocess.sbatch                               => array
"""
_LIBRARY = """
library initialize(Linear(2, 1), 'missing.json')              => missing.json
library initialize(Linear(2, 1), 'folder')                    => folder
library initialize(Linear(2, 1), 'binary')                    => binary
library initialize(Linear(2, 1), 'list.json')                 => list.json
library initialize(Linear(2, 1), 'unknown.json')              => zero_optimisation
library initialize(Linear(2, 1), 'optimizer.json')            => Lion9
library initialize(Linear(2, 1), 5)                           => type int
library initialize(Linear(2, 1), None)                        => None
library initialize('model', GOOD)                             => model
library initialize(None, GOOD)                                => None
library initialize(Linear, GOOD)                              => Linear
library initialize(Linear(2, 1), {**GOOD, 'zero_optimization': {'stage': 7}})     => 7
library initialize(Linear(2, 1), {**GOOD, 'gradient_accumulation_steps': 0})      => gradient_accumulation_steps
library initialize(Linear(2, 1), {**GOOD, 'gradient_clipping': 'much'})           => gradient_clipping
library initialize(Linear(2, 1), {**GOOD, 5: 6})              => 5
library initialize(Linear(2, 1), {'optimizer': {'type': 'Adam', 'params': {'lr': -1}}}) => lr
library initialize(Linear(2, 1), GOOD, mesh='dp')             => mesh
library initialize(Linear(2, 1), GOOD, optimizer='adam')      => type str
library initialize(Linear(2, 1), GOOD, optimizer=torch.optim.Adam([torch.zeros(1, requires_grad=True)])) => optimizer
library initialize(torch.nn.Identity(), GOOD)                 => parameter
library initialize(Linear(2, 1), GOOD).step()                 => backward
library initialize(Linear(2, 1), GOOD).save_16bit_model('empty')  => empty
library initialize(Linear(2, 1), {**GOOD, 'zero_optimization': {'stage': 3}}).load_checkpoint('out') => no such folder
"""


def rows() -> Iterator[Row]:
    """Yield all rows."""
    for line in "".join((_PRETRAIN, _PLACES, _ENVIRONMENT, _TOOLS, _SCRIPTS, _LIBRARY)).splitlines():
        if line:
            command, _, told = line.partition("=>")
            yield Row(command.strip(), tuple(part.strip() for part in told.split(" | ")))
