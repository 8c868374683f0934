import torch, transformers as tf, json, subprocess, sys, os, warnings
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers

d = Path("/tmp/brk/tiny")
d.mkdir(exist_ok=True)
t = Tokenizer(models.WordLevel({f"{i}": i for i in range(95)} | {"[UNK]": 95}, unk_token="[UNK]"))
t.pre_tokenizer = pre_tokenizers.Whitespace()
tf.PreTrainedTokenizerFast(tokenizer_object=t, unk_token="[UNK]").save_pretrained(d)
torch.manual_seed(0)
tf.LlamaForCausalLM(
    tf.LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        max_position_embeddings=2048,
    )
).bfloat16().save_pretrained(d)
import random

random.seed(0)
open("/tmp/brk/text.txt", "w").write(" ".join(str(random.randrange(95)) for _ in range(6000)))
open("/tmp/brk/empty.txt", "w").write("")
open("/tmp/brk/short.txt", "w").write("1 2 3")


def run(*a):
    r = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "cute_kernels", "calibrate", *a], capture_output=True, text=True
    )
    print(
        " ".join(a)[:140],
        "| rc",
        r.returncode,
        "|",
        (r.stdout[-300:] + " || " + r.stderr[-500:]).replace("\n", " / "),
        flush=True,
    )


M = ["/tmp/brk/tiny", "--text", "/tmp/brk/text.txt"]
run(*M, "--budget", "0.42", "-o", "/tmp/brk/mix.json")
print(open("/tmp/brk/mix.json").read()[:300].replace("\n", " ") if Path("/tmp/brk/mix.json").exists() else "no file")
for b in ("0", "-1", "nan", "abc", "0.01", "2"):
    run(*M, "--budget", b, "-o", "/tmp/brk/x.json")
run(*M, "--budget", "0.42", "--kv-format", "int4_g4", "-o", "/tmp/brk/y.json")
run(*M, "--budget", "0.42")
run("/tmp/brk/tiny", "--text", "/tmp/brk/empty.txt", "--budget", "0.42", "-o", "/tmp/brk/z.json")
run("/tmp/brk/tiny", "--text", "/tmp/brk/nofile.txt", "--budget", "0.42", "-o", "/tmp/brk/z.json")
run("/tmp/brk/nomodel", "--text", "/tmp/brk/text.txt", "--budget", "0.42", "-o", "/tmp/brk/z.json")
run(*M, "--kv-format", "int4_g9", "-o", "/tmp/brk/c.safetensors")
run(*M, "--kv-format", "int8_head", "-o", "/tmp/brk/nodir/c.safetensors")
run(*M, "--budget", "0.42", "-o", "/tmp/brk/nodir/c.json")
