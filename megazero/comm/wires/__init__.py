"""The ways in which a shard group's bytes travel: in one hop or two, as they are or quantized."""
