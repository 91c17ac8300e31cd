"""Does ddp-train tokenize texts as Hugging Face's tokenizers does? Exits 1 if not, and prints a table.

    python tests/peers/tokenizing.py target/release/ddp-train           # compare
    python tests/peers/tokenizing.py target/release/ddp-train --time    # also MB/s of both, on all cores
    python tests/peers/tokenizing.py --golden tests/golden/tokenizer    # writes the small tokenizer of the Rust tests

It needs the packages tokenizers and numpy. Tokenizers of each kind are trained on the spot.
"""
import json
import os
import random
import subprocess
import sys
import tempfile
import time

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END = "<|endoftext|>"
WORDS = ("the of and to be is it was For THE don't we'll naïve Straße über 12 3456 7.5 $9,99 東京 の 日本語 Привет мир مرحبا नमस्ते 한국어 😀 👩‍👩‍👧 \u00a0 \u3000 "
         "foo_bar(x) => {y}; https://a.b/c?d=e — … “q” \\n \t \ufeff e\u0301").split(" ")
GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def some_text(seed, words):
    chosen = random.Random(seed)
    gap = lambda: chosen.choice([" "] * 12 + ["\n", "\n\n", "  ", "\t", " \n", "\r\n", "    ", ""])
    return "".join(chosen.choice(WORDS) + gap() for _ in range(words))


def texts():
    """Documents by name."""
    few = {"words": some_text(1, 3000), "end inside": f"a{END}b {END} c{END}{END}", "spaces": "   \n \n\n  x  \n\t\ty   ", "one letter": "x",
           "digits": "1234567 12 123 1 " * 9, "null": "a\0b\0\0c"}
    # Characters that Python knows and that are not private.
    known = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    few["all characters"] = "".join(f"a{c}b {c} {c}1" + "\n" * (index % 7 == 0) for index, c in enumerate(known[:0x3000] + known[0x1F000:0x1FB00]))
    # Longer than the pieces that long texts are cut into.
    few["long"] = some_text(2, 900_000)
    return few


def trained(model, trainer, sample, pre_tokenizer=None, normalizer=None, decoder=None):
    tokenizer = Tokenizer(model)
    for name, value in [("pre_tokenizer", pre_tokenizer), ("normalizer", normalizer), ("decoder", decoder)]:
        if value is not None:
            setattr(tokenizer, name, value)
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def byte_level(size, sample, **changes):
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    return trained(models.BPE(), trainer, sample, decoder=decoders.ByteLevel(),
                   **{"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False), **changes})


def kinds(sample):
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(GPT4), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    # Without a pre-tokenizer words would be whole documents, which takes long to train.
    llama_2 = trained(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True),
                      trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)], show_progress=False),
                      sample, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never"))
    llama_2.pre_tokenizer = None
    llama_2.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return {
        "GPT-2 (byte-level BPE)": byte_level(2000, sample),
        "Llama 3 (another pattern)": byte_level(2000, sample, pre_tokenizer=split),
        "with a space in front": byte_level(2000, sample, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "NFC": byte_level(2000, sample, normalizer=normalizers.NFC()),
        "Llama 2 (no pre-tokenizer)": llama_2,
        "BERT (WordPiece)": trained(models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer(vocab_size=1500, special_tokens=["[UNK]", "</s>"], show_progress=False),
                                    sample, pre_tokenizer=pre_tokenizers.BertPreTokenizer(), normalizer=normalizers.BertNormalizer()),
        "T5 (Unigram)": trained(models.Unigram(), trainers.UnigramTrainer(vocab_size=600, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False),
                                sample, pre_tokenizer=pre_tokenizers.Metaspace(), normalizer=normalizers.NFKC()),
    }


def run(*words):
    done = subprocess.run([PROGRAM, "tokenize", *words, "--progress", "never"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def shards(folder):
    """The tokens of all shards."""
    parts = []
    for name in sorted(name for name in os.listdir(folder) if name.endswith(".bin")):
        data = open(os.path.join(folder, name), "rb").read()
        start, length = np.frombuffer(data[8:24], "<u8")
        array = json.loads(data[int(start):int(start + length)])["arrays"][0]
        kind = {"u16": "<u2", "u32": "<u4"}[array["element"]]
        parts.append(np.frombuffer(data, kind, array["shape"][0], array["offset"]).astype(np.int64))
    return np.concatenate(parts)


def expected(tokenizer, documents):
    end = next(tokenizer.token_to_id(name) for name in (END, "</s>") if tokenizer.token_to_id(name) is not None)
    return np.concatenate([np.array(tokenizer.encode(text, add_special_tokens=False).ids + [end], np.int64) for text in documents])


def difference(ours, theirs):
    if len(ours) == len(theirs) and (ours == theirs).all():
        return "equal"
    shorter = min(len(ours), len(theirs))
    apart = np.flatnonzero(ours[:shorter] != theirs[:shorter])
    return f"DIFFER at token {apart[0] if len(apart) else shorter} of {len(theirs)} (got {len(ours)})"


def compare(folder):
    at = lambda *names: os.path.join(folder, *names)
    documents = texts()
    sample = [documents["words"], documents["digits"]]
    with open(at("all.jsonl"), "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents.values())
    files = []
    for index, text in enumerate(documents.values()):
        files.append(at(f"{index}.txt"))
        open(files[-1], "w", newline="").write(text)
    run(*files, "--tokenizer", "bytes", "--out", at("bytes"))
    tokenizers = {**kinds(sample), "bytes": Tokenizer.from_file(at("bytes", "tokenizer.json"))}
    rows, is_well = [], True
    for index, (name, tokenizer) in enumerate(tokenizers.items()):
        tokenizer.save(at(f"{index}.json"))
        theirs = expected(tokenizer, documents.values())
        for kind, given in [("texts", files), ("jsonl", [at("all.jsonl")])]:
            run(*given, "--tokenizer", "bytes" if name == "bytes" else at(f"{index}.json"), "--out", at(f"{kind}-{index}"))
            found = difference(shards(at(f"{kind}-{index}")), theirs)
            is_well &= found == "equal"
            rows.append(f"| {name} | {kind} | {len(theirs)} | {found} |")
    run(at("0.txt"), at("4.txt"), "--train-bpe", "2000", "--out", at("learned"))
    ours = json.load(open(at("learned", "tokenizer.json")))["model"]
    theirs = json.loads(byte_level(2000, [documents["words"], documents["digits"]]).to_str())["model"]
    is_same = ours["vocab"] == theirs["vocab"] and ours["merges"] == theirs["merges"]
    rows.append(f"| a learned vocabulary | texts | {len(theirs['vocab'])} | {'equal' if is_same else 'DIFFER'} |")
    return rows, is_well and is_same


def measure(folder):
    """MB/s of both, tokens of 8 MB in documents of about 4 kB, from the file to the file."""
    path, tokenizer = os.path.join(folder, "time.jsonl"), byte_level(8192, [some_text(3, 30_000)])
    documents = [some_text(seed, 600) for seed in range(2000)]
    tokenizer.save(os.path.join(folder, "time.json"))
    with open(path, "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
    mb = sum(len(text.encode()) for text in documents) / 1e6
    began = time.perf_counter()
    run(path, "--tokenizer", os.path.join(folder, "time.json"), "--out", os.path.join(folder, "time"))
    ours = time.perf_counter() - began
    began = time.perf_counter()
    read = [json.loads(line)["text"] for line in open(path)]
    encoded = tokenizer.encode_batch_fast(read, add_special_tokens=False)
    np.concatenate([np.array(one.ids + [0], np.uint16) for one in encoded]).tofile(os.path.join(folder, "theirs.bin"))
    theirs = time.perf_counter() - began
    return [f"| {mb:.0f} MB of .jsonl | {mb / ours:.1f} MB/s | Python: {mb / theirs:.1f} MB/s | |"]


def write_golden(folder):
    os.makedirs(folder, exist_ok=True)
    few = {name: text for name, text in texts().items() if len(text) < 300} | {"words": some_text(1, 120)}
    tokenizer = byte_level(400, [some_text(1, 3000)])
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    cases = [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False).ids} for text in few.values()]
    with open(os.path.join(folder, "expected.json"), "w") as file:
        json.dump({"end": tokenizer.token_to_id(END), "cases": cases}, file)
        file.write("\n")


if sys.argv[1] == "--golden":
    write_golden(sys.argv[2])
else:
    PROGRAM = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        rows, is_well = compare(folder)
        if "--time" in sys.argv:
            rows += measure(folder)
    print("| tokenizer | files | tokens | |\n|---|---|---|---|")
    print("\n".join(rows))
    sys.exit(not is_well)
