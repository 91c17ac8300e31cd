//! Texts in every format become the same tokens; errors in them are named; a run that was killed
//! can continue, and its unfinished output is never taken as complete.

mod stream;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use super::*;
use crate::error::Result;
use crate::files::{Array, TokenFile, open_tokens};
use crate::spec::TokensSpec;
use crate::tokens::TokenFiles;
use ddp_kernels::files::testing::{Failing, Scratch};

const SMALL: ShardSizes = ShardSizes {
    piece_bytes: 1 << 12,
    shard_bytes: 1 << 14,
};

const TEXT: &str = "One line.\n\n  Another – with “signs”, 12 numbers…\nEnd";

fn file(scratch: &Scratch, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = scratch.path().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zst(bytes: &[u8]) -> Vec<u8> {
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};
    compress_to_vec(bytes, CompressionLevel::Fastest)
}

/// The documents of a file, and how many pieces they come in.
fn read(path: &Path, lossy: bool, encoder: &Encoder) -> Result<(Vec<String>, usize)> {
    let (mut all, mut pieces, mut is_new) = (Vec::new(), 0, true);
    let options = ReadOptions {
        field: "text",
        lossy,
        encoder: Some(encoder),
        piece_bytes: SMALL.piece_bytes,
        read_bytes: &AtomicU64::new(0),
        columns: None,
    };
    documents(path, &options, &mut |piece| {
        if is_new {
            all.push(String::new());
        }
        all.last_mut().unwrap().push_str(&piece.text);
        (pieces, is_new) = (pieces + 1, piece.ends_document);
        Ok(())
    })?;
    Ok((all, pieces))
}

fn options(file: &Path, out: PathBuf) -> TokenizeOptions {
    TokenizeOptions {
        files: vec![file.into()],
        tokenizer: TokenizerChoice::Bytes,
        end_token: None,
        field: "text".into(),
        lossy: false,
        val_split: 0.0,
        out,
        sizes: SMALL,
        columns: None,
    }
}

fn run(options: &TokenizeOptions) -> Result<Tokenized> {
    tokenize(options, &mut |_| {})
}

/// The tokens of all shards in a folder.
fn shards(folder: &Path) -> Vec<Vec<i64>> {
    let entries = fs::read_dir(folder).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "bin"));
    paths.sort();
    let read = |path: &PathBuf| {
        let TokenFile {
            tokens: array,
            coding,
        } = open_tokens(path, None, None).unwrap();
        assert!(coding.tokenizer.is_some() && coding.end_of_text.is_some());
        let mut tokens = vec![0; array.rows() as usize];
        array.read_i64(0, &mut tokens).unwrap();
        tokens
    };
    paths.iter().map(read).collect()
}

/// Each byte, and the end of each document.
fn as_bytes(documents: &[&str]) -> Vec<i64> {
    let tokens = |text: &&str| text.bytes().map(i64::from).chain([256]).collect::<Vec<_>>();
    documents.iter().flat_map(tokens).collect()
}

fn refusal<T: std::fmt::Debug>(result: Result<T>, exit_code: u8) -> String {
    let error = result.unwrap_err();
    assert_eq!(error.exit_code(), exit_code, "{error}");
    error.to_string()
}

#[test]
fn every_format_gives_the_same_tokens() {
    let scratch = Scratch::new();
    let line = |text: &str| format!("{}\n", serde_json::json!({"id": 1, "text": text}));
    let lines = [line(TEXT), "\n".into(), line("second")].concat();
    let text = TEXT.as_bytes();
    for (number, (name, bytes, documents)) in [
        ("a.txt", text.to_vec(), &[TEXT][..]),
        ("a", text.to_vec(), &[TEXT]),
        ("a.TXT.gz", gz(text), &[TEXT]),
        ("a.txt.zst", zst(text), &[TEXT]),
        ("a.jsonl", lines.clone().into_bytes(), &[TEXT, "second"]),
        ("b.jsonl.zst", zst(lines.as_bytes()), &[TEXT, "second"]),
        ("c.ndjson.gz", gz(lines.as_bytes()), &[TEXT, "second"]),
    ]
    .into_iter()
    .enumerate()
    {
        let path = file(&scratch, name, bytes);
        let out = scratch.path().join(format!("out{number}"));
        let done = run(&options(&path, out.clone())).unwrap();
        assert_eq!(shards(&out), [as_bytes(documents)], "{name}");
        let [train, val] = done.sides;
        assert_eq!(
            (train.documents as usize, val),
            (documents.len(), Side::default())
        );
        assert_eq!(train.tokens as usize, as_bytes(documents).len());
    }
}

#[test]
fn the_frames_of_a_zst_file_follow_each_other_and_are_checked() {
    let scratch = Scratch::new();
    let skipped = [
        &0x184D_2A53u32.to_le_bytes()[..],
        &3u32.to_le_bytes(),
        b"abc",
    ]
    .concat();
    let whole = [zst(b"one "), skipped, zst(b"two")].concat();
    let opened = |bytes: &[u8]| {
        let path = file(&scratch, "a.txt.zst", bytes);
        read(&path, false, &Encoder::Bytes)
    };
    assert_eq!(opened(&whole).unwrap().0, ["one two"]);
    let first = zst(b"one ").len();
    for end in 1..whole.len() {
        // Between two frames a file may end.
        if end != first && end != first + 11 {
            let text = refusal(opened(&whole[..end]), 65);
            assert!(text.contains("a.txt.zst"), "{text}");
        }
    }
    let mut damaged = zst(TEXT.repeat(9).as_bytes());
    let middle = damaged.len() / 2;
    damaged[middle] ^= 4;
    refusal(opened(&damaged), 65);
}

#[test]
fn what_is_wrong_with_a_text_is_named() {
    let scratch = Scratch::new();
    let long = "é".repeat(5000);
    let late = [long.as_bytes(), b"\xff"].concat();
    let wide = b"w\0i\0d\0e\0 \0".repeat(8);
    let cases: [(&str, &[u8], &str); 17] = [
        ("a.txt", b"ab\xffcd", "a.txt: byte 2: expected UTF-8"),
        ("b.txt", &late, "b.txt: byte 10000: expected UTF-8"),
        ("cut.txt", b"ab\xe2\x82", "cut.txt: byte 2: expected UTF-8"),
        (
            "empty.txt",
            b"",
            "expected text, got 1 documents without any",
        ),
        (
            "empty.txt.gz",
            &gz(b""),
            "expected text, got 1 documents without any",
        ),
        ("no.gz", b"plain text", "no.gz: "),
        ("no.zst", b"plain text", "no.zst: zstd: "),
        ("half.txt.gz", &gz(late.as_slice())[..25], "half.txt.gz: "),
        (
            "a.json",
            b"{\"text\": \"a\"}",
            "expected a text or .jsonl, got .json; help: rename it to .jsonl, with each object on a line",
        ),
        (
            "b.json",
            b"\xef\xbb\xbf [{\"text\": \"a\"}]",
            "help: write each object on a line of a .jsonl file: jq -c '.[]' IN.json >OUT.jsonl",
        ),
        (
            "a.jsonl",
            b"{\"text\": \"a\"}\n{\"t\": 1}\n",
            "line 2: expected a text in the field \"text\", got [t]",
        ),
        (
            "b.jsonl",
            b"{\"text\": 5}",
            "line 1: expected a text in the field \"text\", got another value",
        ),
        (
            "c.jsonl",
            b"\n{\"text\": x}\n",
            "c.jsonl: line 2: expected a JSON object: expected value in column 10",
        ),
        (
            "e.jsonl",
            b"{\"text\": NaN, \"x\": NaN}",
            "line 1: expected a text in the field \"text\", got another value",
        ),
        (
            "f.txt",
            &wide,
            "f.txt: expected UTF-8, got NUL bytes, as UTF-16 has; help: save the file as UTF-8 (iconv -f UTF-16 -t UTF-8)",
        ),
        (
            "f.jsonl",
            b"\xff\xfe{\0}\0",
            "f.jsonl: expected UTF-8, got UTF-16; help: save the file as UTF-8",
        ),
        (
            "d.jsonl",
            b"{\"text\": \"a\"}\n{\"text\": \"\xff\"}",
            "byte 24: expected UTF-8, got other bytes; help: convert the file (if it is Latin-1: iconv -f latin1",
        ),
    ];
    for (name, bytes, part) in cases {
        let path = file(&scratch, name, bytes);
        let out = scratch.path().join("out");
        let text = refusal(run(&options(&path, out)), 65);
        assert!(text.contains(part), "{text}\n  lacks: {part}");
        let left: Vec<_> = scratch
            .names()
            .into_iter()
            .filter(|name| name.contains("out"))
            .collect();
        assert_eq!(left, [""; 0], "{text}");
    }
    let missing = run(&options(
        &scratch.path().join("missing.txt"),
        scratch.path().join("out"),
    ));
    refusal(missing, 74);
}

#[test]
fn empty_files_and_byte_order_marks_are_skipped() {
    let scratch = Scratch::new();
    let line = "{\"text\": \"a line\"}\n";
    let files = [
        ("a.txt", "\u{feff}a text".into()),
        ("b.txt", String::new()),
        ("c.jsonl", format!("\u{feff}{line}{line}")),
        ("d.jsonl", String::new()),
        ("e.txt", "\u{feff}".into()),
        ("f.txt", "the \u{feff}last".into()),
    ]
    .map(|(name, text)| file(&scratch, name, text));
    let asked = TokenizeOptions {
        files: files.to_vec(),
        ..options(&files[0], scratch.path().join("out"))
    };
    let done = run(&asked).unwrap();
    let documents = ["a text", "a line", "a line", "the \u{feff}last"];
    assert_eq!(shards(&asked.out), [as_bytes(&documents)]);
    assert_eq!(done.empty_documents, 3);
    // Places count the mark's bytes.
    let late = [&b"\xef\xbb\xbfab"[..], b"\xff"].concat();
    let path = file(&scratch, "g.txt", late);
    let text = refusal(read(&path, false, &Encoder::Bytes), 65);
    assert!(text.contains("g.txt: byte 5: expected UTF-8"), "{text}");
}

#[test]
fn a_folder_that_lacks_a_shard_is_refused() {
    let scratch = Scratch::new();
    let line = |number: usize| format!("{{\"text\": \"document {number}\"}}\n");
    let path = file(&scratch, "a.jsonl", (0..40).map(line).collect::<String>());
    let asked = TokenizeOptions {
        val_split: 0.5,
        sizes: ShardSizes {
            shard_bytes: 100,
            ..SMALL
        },
        ..options(&path, scratch.path().join("out"))
    };
    let [train, val] = run(&asked).unwrap().sides;
    for (side, of) in [("", train), ("val", val)] {
        let folder = asked.out.join(side);
        let spec = TokensSpec {
            path: folder.to_str().unwrap().into(),
            ..TokensSpec::default()
        };
        let opened = || {
            let files = TokenFiles::open(&spec, crate::setting::DATA, None)?;
            Ok(files.arrays.iter().map(Array::rows).sum::<u64>())
        };
        assert_eq!(opened().unwrap(), of.tokens);
        for number in 0..of.shards {
            let name = format!("tokens-{number:06}.bin");
            let (there, aside) = (folder.join(&name), scratch.path().join("aside"));
            fs::rename(&there, &aside).unwrap();
            let text = refusal(opened(), 65);
            let expected = format!("{} shards with {} tokens", of.shards, of.tokens);
            assert!(text.contains(&expected), "{text}");
            assert!(text.contains(&format!("got no {name}")), "{text}");
            fs::rename(&aside, &there).unwrap();
        }
        let extra = folder.join("tokens-999999.bin");
        fs::copy(folder.join("tokens-000000.bin"), &extra).unwrap();
        refusal(opened(), 65);
        fs::remove_file(&extra).unwrap();
        fs::write(folder.join("shards.json"), "{\"shards\": ").unwrap();
        let text = refusal(opened(), 65);
        assert!(text.contains("shards.json"), "{text}");
        fs::remove_file(folder.join("shards.json")).unwrap();
    }
    // So are the folders of version 0.7: the same command finds nothing to do.
    run(&asked).unwrap();
    assert!(!asked.out.join("shards.json").exists());
}

#[test]
fn bytes_that_are_not_utf_8_are_replaced_if_asked_for() {
    let scratch = Scratch::new();
    // Characters that end in another chunk than they begin in, and some that never end.
    let mut bytes = "aé😀".repeat(2000).into_bytes();
    for place in (0..bytes.len()).step_by(999) {
        bytes[place] = 0xe2;
    }
    bytes.extend(b"end\xf0\x9f");
    let path = file(&scratch, "a.txt", &bytes);
    let (found, _) = read(&path, true, &Encoder::Bytes).unwrap();
    assert!(found[0] == String::from_utf8_lossy(&bytes));
    let path = file(&scratch, "a.jsonl", b"{\"text\": \"a\xffb\"}\n");
    assert_eq!(
        read(&path, true, &Encoder::Bytes).unwrap().0,
        ["a\u{fffd}b"]
    );
}

#[test]
fn documents_are_held_out_at_random_and_each_once() {
    let scratch = Scratch::new();
    let line = |number: usize| format!("{{\"text\": \"{number:04}\"}}\n");
    let path = file(&scratch, "a.jsonl", (0..1000).map(line).collect::<String>());
    let out = scratch.path().join("out");
    let split = TokenizeOptions {
        val_split: 0.1,
        ..options(&path, out.clone())
    };
    let done = run(&split).unwrap();
    assert_eq!(done.sides.map(|side| side.documents), [900, 100]);
    let numbers = |folder: &Path| -> Vec<usize> {
        let tokens = shards(folder).concat();
        let texts = tokens.chunks(5).map(|document| {
            let bytes: Vec<u8> = document[..4].iter().map(|&token| token as u8).collect();
            String::from_utf8(bytes).unwrap().parse().unwrap()
        });
        texts.collect()
    };
    let (train, val) = (numbers(&out), numbers(&out.join("val")));
    let mut all = [train, val.clone()].concat();
    all.sort();
    assert_eq!(all, (0..1000).collect::<Vec<_>>());
    // One in ten that follow each other, not always the same.
    assert!(
        (0..100).all(|stratum| val[stratum] / 10 == stratum),
        "{val:?}"
    );
    let places: std::collections::BTreeSet<_> = val.iter().map(|number| number % 10).collect();
    assert!(places.len() > 5, "{val:?}");
    // Too few documents.
    let one = file(&scratch, "one.txt", "one");
    let alone = TokenizeOptions {
        files: vec![one],
        out: scratch.path().join("alone"),
        ..split
    };
    let text = refusal(run(&alone), 65);
    assert!(
        text.contains("`val-split` 0.1: expected documents on both sides"),
        "{text}"
    );
}

#[test]
fn a_killed_run_goes_on_and_is_not_whole_before_its_end() {
    let scratch = Scratch::new();
    let line = |number: usize| format!("{{\"text\": \"document {number}\"}}\n");
    let path = file(&scratch, "a.jsonl", (0..40).map(line).collect::<String>());
    let with = |out: &str| TokenizeOptions {
        val_split: 0.2,
        sizes: ShardSizes {
            shard_bytes: 100,
            ..SMALL
        },
        ..options(&path, scratch.path().join(out))
    };
    let whole = run(&with("whole")).unwrap();
    assert!(
        whole.sides[0].shards > 3 && whole.sides[1].shards > 0,
        "{whole:?}"
    );
    let (out, mut known) = (scratch.path().join("out"), Vec::new());
    for call in 0.. {
        let disk = Failing::at(call, true, scratch.path());
        let killed = run(&with("out"));
        let calls = disk.calls().len();
        drop(disk);
        if calls <= call {
            killed.unwrap();
            break;
        }
        if out.exists() {
            // The last call makes the new name durable.
            assert_eq!(shards(&out), shards(&scratch.path().join("whole")));
        }
        // A shard of other texts, and one that is not finished.
        let unfinished = scratch.path().join(".out.unfinished");
        if unfinished.exists() {
            fs::write(unfinished.join("tokens-000077.bin"), "other").unwrap();
            fs::write(unfinished.join("tokens-000001.bin"), "other").unwrap();
        }
        let done = run(&with("out")).unwrap();
        known.push(done.known_shards);
        for side in ["", "val"] {
            assert_eq!(
                shards(&out.join(side)),
                shards(&scratch.path().join("whole").join(side))
            );
        }
        assert_eq!(done.sides, whole.sides);
        fs::remove_dir_all(&out).unwrap();
        let left = scratch.names();
        assert!(
            !left.iter().any(|name| name.starts_with(".out")),
            "{left:?}"
        );
    }
    assert!(
        known[0] == 0 && known.contains(&(whole.sides[0].shards - 1)),
        "{known:?}"
    );
    assert!(known.iter().any(|&count| count > 2), "{known:?}");
}

#[test]
fn a_whole_folder_is_never_changed() {
    let scratch = Scratch::new();
    let path = file(&scratch, "a.txt", TEXT);
    let asked = options(&path, scratch.path().join("out"));
    run(&asked).unwrap();
    let again = run(&asked).unwrap();
    assert_eq!((again.known_shards, again.text_bytes), (1, 0));
    fs::write(&path, "other").unwrap();
    let text = refusal(run(&asked), 2);
    assert!(
        text.contains("or one with the same tokens, got other files"),
        "{text}"
    );
    assert_eq!(shards(&asked.out), [as_bytes(&[TEXT])]);
    let other = scratch.path().join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("mine"), "mine").unwrap();
    refusal(run(&options(&path, other)), 2);
    refusal(run(&options(&path, path.clone())), 2);
    assert_eq!(scratch.names(), ["a.txt", "other", "out"]);
}

#[test]
fn the_end_of_documents_is_a_special_token() {
    let bytes = Vocabulary::bytes();
    assert_eq!((bytes.size, bytes.end_of_text(None).unwrap()), (257, 256));
    assert_eq!(bytes.special_text(256), Some("<|endoftext|>"));
    let text = refusal(bytes.end_of_text(Some("</s>")), 2);
    assert!(text.contains("(\"</s>\"), got [<|endoftext|>]"), "{text}");
    let without = br#"{"added_tokens": [], "model": {"vocab": {"a": 0, "b": 1}}}"#;
    let without = Vocabulary::of_bytes(without.to_vec()).unwrap();
    let text = refusal(without.end_of_text(None), 2);
    assert!(
        text.contains("expected a special token that ends documents"),
        "{text}"
    );
    // Tokens, not how the file is written, are the vocabulary.
    let again = br#"{"model": {"vocab": {"b":1,"a":0}}, "added_tokens": []}"#;
    assert_eq!(
        Vocabulary::of_bytes(again.to_vec()).unwrap().hash,
        without.hash
    );
    let list = br#"{"model": {"vocab": [["a", -1.5], ["b", -2]]}}"#;
    assert_eq!(
        Vocabulary::of_bytes(list.to_vec()).unwrap().hash,
        without.hash
    );
    for bad in [
        &b"{}"[..],
        b"",
        b"[]",
        br#"{"model": {"vocab": {}}}"#,
        br#"{"model": {"vocab": {"a": 4294967295}}}"#,
    ] {
        let why = Vocabulary::of_bytes(bad.to_vec()).unwrap_err();
        assert!(why.contains("expected a tokenizer.json"), "{why}");
    }
}

#[cfg(feature = "tokenizers")]
mod with_tokenizers {
    use serde_json::Value;

    use super::*;

    /// Written by tests/peers/tokenizing.py with Hugging Face's tokenizers in Python.
    fn golden() -> (PathBuf, Value) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tokenizer");
        let expected = fs::read_to_string(folder.join("expected.json")).unwrap();
        (
            folder.join(TOKENIZER_FILE),
            serde_json::from_str(&expected).unwrap(),
        )
    }

    fn encoder(path: &Path) -> Encoder {
        Encoder::of(&Vocabulary::read(path).unwrap()).unwrap()
    }

    #[test]
    fn tokens_are_those_of_hugging_face() {
        let scratch = Scratch::new();
        let (path, expected) = golden();
        let (mut lines, mut tokens) = (String::new(), Vec::new());
        for case in expected["cases"].as_array().unwrap() {
            lines += &format!("{}\n", serde_json::json!({"text": case["text"]}));
            let ids = case["ids"].as_array().unwrap().iter();
            tokens.extend(ids.chain([&expected["end"]]).map(|id| id.as_i64().unwrap()));
        }
        let asked = TokenizeOptions {
            tokenizer: TokenizerChoice::File(path),
            ..options(
                &file(&scratch, "a.jsonl", lines),
                scratch.path().join("out"),
            )
        };
        run(&asked).unwrap();
        assert_eq!(shards(&asked.out), [tokens]);
    }

    #[test]
    fn bytes_are_those_of_their_own_tokenizer_json() {
        let encoder = Encoder::of(&Vocabulary::bytes()).unwrap();
        let every = (0..0x250).filter_map(char::from_u32).collect::<String>();
        for text in [TEXT, "a<|endoftext|>b<|endoftext|>", &every] {
            assert_eq!(
                encoder.encode(text).unwrap(),
                Encoder::Bytes.encode(text).unwrap()
            );
        }
    }

    #[test]
    fn a_long_text_is_cut_only_where_tokens_stay_the_same() {
        let scratch = Scratch::new();
        let (path, _) = golden();
        let line =
            |number: usize| format!("{number} words and\n\n  more: don’t “stop” {number}!\t\r\n");
        let text: String = (0..400).map(line).collect();
        let long = file(&scratch, "a.txt", &text);
        let free = encoder(&path);
        let (found, pieces) = read(&long, false, &free).unwrap();
        assert!(
            found[0] == text && pieces > text.len() / (SMALL.piece_bytes + 1024),
            "{pieces}"
        );
        let asked = TokenizeOptions {
            tokenizer: TokenizerChoice::File(path.clone()),
            ..options(&long, scratch.path().join("out"))
        };
        run(&asked).unwrap();
        let mut expected = free.encode(&text).unwrap();
        expected.push(Vocabulary::read(&path).unwrap().end_of_text(None).unwrap());
        let found = shards(&asked.out).concat();
        assert!(expected.iter().map(|&token| i64::from(token)).eq(found));
        // With a space before each text every cut would add one.
        let spaced = fs::read_to_string(&path).unwrap();
        let spaced = spaced.replace("\"add_prefix_space\": false", "\"add_prefix_space\": true");
        let bound = encoder(&file(&scratch, "spaced.json", spaced));
        assert_eq!(bound.encode("a").unwrap(), free.encode(" a").unwrap());
        let (found, pieces) = read(&long, false, &bound).unwrap();
        assert_eq!((found[0] == text, pieces), (true, 1));
    }

    #[test]
    fn whitespace_that_the_tokenizer_gives_up_on_is_refused() {
        let scratch = Scratch::new();
        let (path, _) = golden();
        let text = |spaces: usize| format!("Two words{}more words after\n", " ".repeat(spaces));
        // One space fewer is right to the end, with Llama 3's pattern, too.
        let mut llama_3: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        llama_3["pre_tokenizer"] = serde_json::json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}
        ]});
        let most = 499_999;
        for path in [
            path.clone(),
            file(&scratch, "llama-3.json", llama_3.to_string()),
        ] {
            let encoder = encoder(&path);
            let tail = encoder.encode(" more words after\n").unwrap();
            assert!(tail.len() > 3);
            assert!(encoder.encode(&text(most)).unwrap().ends_with(&tail));
            let why = encoder.encode(&text(most + 1)).unwrap_err();
            assert!(
                why.starts_with("expected fewer than 500000 bytes of whitespace"),
                "{why}"
            );
        }
        let lines = serde_json::json!({"text": text(most + 1)});
        for (name, bytes) in [
            ("a.txt", text(most + 1)),
            ("a.jsonl", format!("\n{lines}\n")),
        ] {
            let file = file(&scratch, name, bytes);
            for tokenizer in [
                TokenizerChoice::File(path.clone()),
                TokenizerChoice::Learned(300),
            ] {
                let asked = TokenizeOptions {
                    tokenizer,
                    ..options(&file, scratch.path().join("out"))
                };
                let why = refusal(run(&asked), 65);
                assert!(why.contains("whitespace in a row"), "{why}");
            }
            run(&options(&file, scratch.path().join(format!("{name}.out")))).unwrap();
        }
    }

    #[test]
    fn a_learned_vocabulary_is_the_same_every_time() {
        let scratch = Scratch::new();
        let text = "To be is to do, to do is to be. <|endoftext|>Do be do be do! ".repeat(50);
        let path = file(&scratch, "a.txt", text);
        let learned = |out: &str| {
            let asked = TokenizeOptions {
                tokenizer: TokenizerChoice::Learned(265),
                ..options(&path, scratch.path().join(out))
            };
            let done = run(&asked).unwrap();
            let read = |name: &str| fs::read(asked.out.join(name)).unwrap();
            (done, read(TOKENIZER_FILE))
        };
        let (first, tokenizer) = learned("a");
        assert_eq!(first.vocabulary, 265);
        let (second, same) = learned("b");
        assert!((first.sides, &tokenizer) == (second.sides, &same));
        // Whole words became tokens.
        let vocabulary = String::from_utf8(tokenizer).unwrap();
        assert!(vocabulary.contains("\"Ġbe\""));
    }

    #[test]
    fn a_tokenizer_that_cannot_be_used_is_named() {
        let scratch = Scratch::new();
        let text = file(&scratch, "a.txt", TEXT);
        let unknown =
            br#"{"version": "1.0", "added_tokens": [{"id": 9, "content": "</s>", "special": true}],
                          "model": {"type": "Unheard", "vocab": {"a": 0}}}"#;
        let path = file(&scratch, "tokenizer.json", unknown);
        let asked = |path: &Path| TokenizeOptions {
            tokenizer: TokenizerChoice::File(path.into()),
            ..options(&text, scratch.path().join("out"))
        };
        let text = refusal(run(&asked(&path)), 65);
        assert!(
            text.contains("tokenizer.json: expected a tokenizer.json: "),
            "{text}"
        );
        let (path, _) = golden();
        let named = TokenizeOptions {
            end_token: Some("<eos>".into()),
            ..asked(&path)
        };
        refusal(run(&named), 2);
        assert!(matches!(
            run(&asked(&scratch.path().join("x.json"))),
            Err(crate::error::Error::Io { .. })
        ));
    }
}

#[test]
fn a_tokenizer_whose_steps_multiply_a_text_is_refused() {
    let double = |kind: &str| {
        format!(r#"{{"type": "Replace", "pattern": {{"{kind}": "e"}}, "content": "ee"}}"#)
    };
    let of = |which: &str, list: &str, steps: &[String]| {
        let model = r#""model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}"#;
        let steps = steps.join(",");
        let json =
            format!(r#"{{"{which}": {{"type": "Sequence", "{list}": [{steps}]}}, {model}}}"#);
        Vocabulary::of_bytes(json.into_bytes())
    };
    let usual = [
        r#"{"type": "Prepend", "prepend": "▁"}"#.to_string(),
        r#"{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}"#.into(),
        r#"{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}"#.into(),
    ];
    of("normalizer", "normalizers", &usual).unwrap();
    for kind in ["String", "Regex"] {
        for (which, list) in [("normalizer", "normalizers"), ("decoder", "decoders")] {
            let why = of(which, list, &vec![double(kind); 40]).unwrap_err();
            assert!(why.contains("at most 1000 times as long"), "{why}");
        }
    }
    let why = of(
        "normalizer",
        "normalizers",
        &vec![r#"{"type": "NFC"}"#.into(); 101],
    );
    assert!(why.unwrap_err().contains("at most 100 steps"));
}

#[test]
fn numbers_that_only_python_writes_do_not_refuse_a_document() {
    let scratch = Scratch::new();
    let line =
        r#"{"a": [NaN, -Infinity], "t\"NaN": Infinity, "text": "NaN, \\\"Infinity\\", "z": NaN}"#;
    let path = file(&scratch, "a.jsonl", line);
    let (documents, _) = read(&path, false, &Encoder::Bytes).unwrap();
    assert_eq!(documents, [r#"NaN, \"Infinity\"#]);
}
