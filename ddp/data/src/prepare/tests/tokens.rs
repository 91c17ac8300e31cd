//! Files of tokens: the same windows from every format, each target once an epoch on any number of
//! ranks, and refusals that name file, position and token.

use std::collections::BTreeMap;

use super::*;
use crate::files::flat::About;
use crate::files::tokens::write_shard;
use crate::prepare::tokens::read;
use crate::sampler::{Sampler, share};
use crate::spec::TokensSpec;
use crate::tokens::TokenFiles;

/// A file as llm.c writes it.
fn llm_c(
    scratch: &Scratch,
    name: &str,
    [magic, version]: [u32; 2],
    tokens: &[u8],
    count: u32,
) -> PathBuf {
    let mut header = [magic, version, count]
        .map(u32::to_le_bytes)
        .as_flattened()
        .to_vec();
    header.resize(1024, 0);
    file(scratch, name, &[&header, tokens].concat())
}

fn file(scratch: &Scratch, name: &str, bytes: &[u8]) -> PathBuf {
    let path = scratch.path().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn narrow(tokens: &[u32]) -> Vec<u8> {
    bytes(tokens, |token| (token as u16).to_le_bytes())
}

fn wide(tokens: &[u32]) -> Vec<u8> {
    bytes(tokens, u32::to_le_bytes)
}

const GPT_2: [u32; 2] = [20240520, 1];
const LLAMA_3: [u32; 2] = [20240801, 7];

/// Tokens from 1 to 127, so that they can be a text as well.
fn some(count: usize) -> Vec<u32> {
    let token = |index: u64| 1 + (index * index + index / 3) % 127;
    (0..count as u64).map(|index| token(index) as u32).collect()
}

fn request(data: &str) -> DataRequest {
    DataRequest::new(data.parse().unwrap())
}

/// What `data` is with a context of 4.
fn with_context(data: &str) -> DataRequest {
    DataRequest {
        context: Some(4),
        ..request(data)
    }
}

fn opened(request: &DataRequest) -> Data {
    prepare(request, &Alone).unwrap()
}

/// Inputs and targets of these rows.
fn windows(data: &dyn Dataset, rows: &[u64]) -> Vec<[Vec<i64>; 2]> {
    let [inputs, targets] = read_rows(data, rows)
        .unwrap()
        .map(|tensor| tensor.to_vec::<i64>().unwrap());
    let context = data.row_shape()[0];
    let each = inputs.chunks(context).zip(targets.chunks(context));
    each.map(|(inputs, targets)| [inputs.to_vec(), targets.to_vec()])
        .collect()
}

fn all_windows(data: &dyn Dataset) -> Vec<[Vec<i64>; 2]> {
    windows(data, &(0..data.rows()).collect::<Vec<_>>())
}

/// The windows of four tokens that one file of these tokens has.
fn expected(tokens: &[u32]) -> Vec<[Vec<i64>; 2]> {
    let tokens: Vec<i64> = tokens.iter().map(|&token| token.into()).collect();
    let starts = (0..(tokens.len() - 1) / 4).map(|window| window * 4);
    starts
        .map(|start| {
            [
                tokens[start..start + 4].to_vec(),
                tokens[start + 1..start + 5].to_vec(),
            ]
        })
        .collect()
}

/// `tokens` in every format, as a name of data.
fn in_every_format(scratch: &Scratch, tokens: &[u32]) -> Vec<(String, usize)> {
    let shown = |path: PathBuf| path.display().to_string();
    let count = tokens.len() as u32;
    let shard = |name: &str, vocabulary| {
        let path = scratch.path().join(name);
        let about = About {
            vocabulary: Some(vocabulary),
            ..About::default()
        };
        write_shard(&path, about, &[tokens]).unwrap();
        shown(path)
    };
    let text: Vec<u8> = tokens.iter().map(|&token| token as u8).collect();
    let largest = *tokens.iter().max().unwrap() as usize;
    let numpy = npy(
        scratch,
        "array.npy",
        "<u2",
        &[tokens.len()],
        &narrow(tokens),
    );
    vec![
        (
            shown(llm_c(scratch, "gpt2.bin", GPT_2, &narrow(tokens), count)),
            50_257,
        ),
        (
            shown(llm_c(scratch, "llama3.bin", LLAMA_3, &wide(tokens), count)),
            128_256,
        ),
        (
            format!(
                "tokens:{}",
                shown(file(scratch, "train.bin", &narrow(tokens)))
            ),
            largest + 1,
        ),
        (shard("narrow.bin", 300), 300),
        (shard("wide.bin", 70_000), 70_000),
        (shown(file(scratch, "book.txt", &text)), 256),
        (format!("tokens:{}", shown(numpy)), largest + 1),
    ]
}

#[test]
fn every_format_gives_the_same_windows() {
    let scratch = Scratch::new();
    // 16·4 + 1 tokens are 16 windows; two more are in none.
    for (count, dropped) in [(65, 0), (67, 2)] {
        let tokens = some(count);
        for (name, vocabulary) in in_every_format(&scratch, &tokens) {
            let request = with_context(&name);
            let data = opened(&request);
            assert_eq!(all_windows(&*data.train), expected(&tokens), "{name}");
            let largest = tokens.iter().max().unwrap();
            let parts = [
                format!("4 tokens a row, {dropped} at the end of files dropped, {count} tokens in"),
                format!(", the largest {largest}"),
            ];
            let has = |part: &String| data.description.contains(part);
            assert!(parts.iter().all(has), "{name}: {}", data.description);
            assert_eq!(data.train.task().outputs(), vocabulary, "{name}");
            let is_guessed = name.starts_with("tokens:");
            let says = data.description.contains("so the vocabulary is taken as");
            assert_eq!(says, is_guessed, "{}", data.description);
            // A model that says how many tokens it has knows better than a guess.
            for of_model in [64, 90_000] {
                let data = opened(&DataRequest {
                    vocabulary: Some(of_model),
                    ..request.clone()
                });
                let expected = if is_guessed {
                    of_model.max(vocabulary)
                } else {
                    vocabulary
                };
                assert_eq!(data.train.task().outputs(), expected, "{name}");
            }
        }
    }
    let text = opened(&with_context(
        scratch.path().join("book.txt").to_str().unwrap(),
    ))
    .description;
    for part in [
        "16 rows to train on",
        "4 tokens a row",
        "2 at the end of files dropped",
        "67 tokens in 1 file",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn texts_that_a_pattern_matches_are_one_stream_of_files() {
    let scratch = Scratch::new();
    let texts = [&b"a first text"[..], b"and the second"];
    file(&scratch, "b.txt", texts[1]);
    file(&scratch, "a.txt", texts[0]);
    let of = |text: &[u8]| expected(&text.iter().map(|&byte| byte.into()).collect::<Vec<u32>>());
    let data = opened(&with_context(&format!(
        "{}/*.txt",
        scratch.path().display()
    )));
    assert_eq!(all_windows(&*data.train), texts.map(of).concat());
    let marked = [b"\xef\xbb\xbf", texts[1]].concat();
    file(&scratch, "b.txt", &marked);
    let asked = with_context(&format!("{}/*.txt", scratch.path().display()));
    let data = opened(&asked);
    assert_eq!(all_windows(&*data.train), texts.map(of).concat());
    let stated = format!(
        "tokens:{}/*.txt,context=4,type=u32",
        scratch.path().display()
    );
    let text = prepare(&request(&stated), &Alone).unwrap_err().to_string();
    assert!(text.contains("got u8; help: leave out type="), "{text}");
}

#[test]
fn windows_do_not_cross_the_files_of_a_folder() {
    let scratch = Scratch::new();
    let (first, second) = (some(9), some(14));
    llm_c(&scratch, "part_000001.bin", GPT_2, &narrow(&first), 9);
    llm_c(&scratch, "part_000002.bin", GPT_2, &narrow(&second), 14);
    let asked = with_context(scratch.path().to_str().unwrap());
    let data = opened(&asked);
    assert_eq!(
        all_windows(&*data.train),
        [expected(&first), expected(&second)].concat()
    );
    let dropped = ", 1 at the end of files dropped";
    assert!(data.description.contains(dropped), "{}", data.description);
    // The same tokens that are cut elsewhere are other windows: also at the end of a block.
    let all = some(1 << 17);
    let content = |cuts: &[usize]| {
        let scratch = Scratch::new();
        let mut rest = &all[..];
        for (index, &count) in cuts.iter().enumerate() {
            let (part, after) = rest.split_at(count);
            file(&scratch, &format!("{index}.bin"), &narrow(part));
            rest = after;
        }
        let asked = with_context(&format!("tokens:{}", scratch.path().display()));
        let fingerprint = opened(&asked).train.fingerprint().unwrap();
        fingerprint.split("content ").nth(1).map(String::from)
    };
    let whole = content(&[1 << 17]);
    assert_ne!(content(&[1 << 16, 1 << 16]), whole);
    assert_ne!(content(&[5000, (1 << 17) - 5000]), whole);
}

#[test]
fn every_target_comes_once_an_epoch_on_any_number_of_ranks() {
    let scratch = Scratch::new();
    let tokens = some(4 * 23 + 1);
    let path = file(&scratch, "train.bin", &narrow(&tokens));
    let data = opened(&request(&format!("tokens:{},context=4", path.display())));
    let sampler = Sampler::new(data.train.rows(), 5, 3, false).unwrap();
    // The windows of step `step0` on all of `size` ranks, in their order.
    let of_step = |step0, size| {
        let place = sampler.at(step0);
        let order = sampler.permutation(place.epoch);
        let of_rank = |rank| {
            let rows: Vec<u64> = share(&place.positions, rank, size)
                .map(|at| order.row(at))
                .collect();
            windows(&*data.train, &rows)
        };
        (0..size).flat_map(of_rank).collect::<Vec<_>>()
    };
    let steps = sampler.steps_per_epoch();
    for size in [1, 2, 3, 7] {
        let mut counts: BTreeMap<i64, usize> = BTreeMap::new();
        for step0 in 0..steps {
            // A run may stop after any step and continue with another number of ranks.
            assert!(
                of_step(step0, size) == of_step(step0, 1),
                "{size} ranks, step {step0}"
            );
            let targets = of_step(step0, size)
                .into_iter()
                .flat_map(|[_, targets]| targets);
            targets.for_each(|token| *counts.entry(token).or_default() += 1);
        }
        let mut wanted = BTreeMap::new();
        tokens[1..]
            .iter()
            .for_each(|&token| *wanted.entry(i64::from(token)).or_default() += 1);
        assert_eq!(counts, wanted, "{size} ranks");
    }
    assert!(
        of_step(0, 1) != of_step(steps, 1),
        "each epoch has its own order"
    );
}

#[test]
fn ranks_that_share_the_reading_find_the_same() {
    let scratch = Scratch::new();
    // Five blocks, in two files.
    let mut tokens = some(300_000);
    file(&scratch, "a.bin", &narrow(&tokens[..170_000]));
    file(&scratch, "b.bin", &narrow(&tokens[170_000..]));
    let name = format!(
        "tokens:{},context=100,vocabulary=128",
        scratch.path().display()
    );
    let found = |size| {
        let all = ranks(size, |world| match prepare(&request(&name), world) {
            Ok(data) => data.train.fingerprint().unwrap() + &data.description,
            Err(error) => error.to_string(),
        });
        assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
        all[0].clone()
    };
    let one = found(1);
    assert!(
        one.contains("windows 0..2998 of 2998 of 100 tokens"),
        "{one}"
    );
    assert!([2, 3].map(found).iter().all(|other| *other == one));
    // The first bad token is named, whichever rank reads it.
    for index in [170_000 + 129_999, 170_000 + 65_536, 80_000] {
        tokens[index] = 128;
        file(&scratch, "a.bin", &narrow(&tokens[..170_000]));
        file(&scratch, "b.bin", &narrow(&tokens[170_000..]));
        let (name, position) = if index < 170_000 {
            ("a.bin", index)
        } else {
            ("b.bin", index - 170_000)
        };
        for size in [1, 2, 3] {
            let text = found(size);
            let place = format!("{name}, token {position}: expected a token below 128");
            assert!(text.contains(&place) && text.contains("got 128"), "{text}");
        }
    }
}

#[test]
fn ranks_with_other_files_are_told_so() {
    let scratch = Scratch::new();
    let path = scratch.path().join("a.bin");
    let opened = |last| {
        let tokens = [some(40), vec![last]].concat();
        // A new file at the same path.
        let _ = fs::remove_file(&path);
        llm_c(&scratch, "a.bin", GPT_2, &narrow(&tokens), 41);
        let spec = TokensSpec {
            path: path.to_str().unwrap().into(),
            ..TokensSpec::default()
        };
        TokenFiles::open(&spec, crate::setting::DATA, None).unwrap()
    };
    let [one, copy, other] = [5, 5, 6].map(opened);
    let found = |second: &TokenFiles| {
        ranks(3, |world| {
            let files = if world.rank() == 1 { second } else { &one };
            let read = read(files, crate::setting::DATA, (None, ""), 4, world);
            read.map(|summary| summary.content)
                .map_err(|error| error.to_string())
        })
    };
    let same = found(&one);
    assert!(same[0].is_ok() && found(&copy) == same, "{same:?}");
    for text in found(&other).into_iter().map(Result::unwrap_err) {
        assert!(
            text.contains("the content of the tokens") && text.contains("rank 1"),
            "{text}"
        );
    }
}

#[test]
fn the_last_windows_are_held_out() {
    let scratch = Scratch::new();
    let tokens = some(4 * 10 + 1);
    let path = file(&scratch, "train.bin", &narrow(&tokens));
    let name = format!("tokens:{},context=4", path.display());
    let (all, mut request) = (expected(&tokens), request(&name));
    for (split, held_out) in [(0.2, 2), (0.001, 1), (0.999, 9)] {
        request.val_split = split;
        let data = opened(&request);
        let (train, val) = all.split_at(10 - held_out);
        assert_eq!(all_windows(&*data.train), train, "{split}");
        assert_eq!(all_windows(&*data.held_out), val, "{split}");
    }
    let val = file(&scratch, "val.bin", &narrow(&tokens[..9]));
    request.val_split = 0.0;
    request.val_data = Some(format!("tokens:{}", val.display()).parse().unwrap());
    assert_eq!(
        all_windows(&*opened(&request).held_out),
        expected(&tokens[..9])
    );
    // Tokens that the training data do not have.
    file(&scratch, "val.bin", &narrow(&[1, 2, 3, 200, 5]));
    let text = prepare(&request, &Alone).unwrap_err().to_string();
    let vocabulary = tokens.iter().max().unwrap() + 1;
    let part = format!(
        "val.bin, token 3: expected a token below {vocabulary}, the vocabulary of `data`, got 200"
    );
    assert!(text.contains(&part), "{text}");
    let book = file(&scratch, "val.txt", b"some text");
    request.val_data = Some(book.to_str().unwrap().parse().unwrap());
    let text = prepare(&request, &Alone).unwrap_err().to_string();
    assert!(
        text.contains("expected tokens of a tokenizer, as `data` has, got bytes of a text"),
        "{text}"
    );
}

#[test]
fn a_trained_model_says_context_and_vocabulary() {
    let scratch = Scratch::new();
    let tokens = some(41);
    let path = file(&scratch, "train.bin", &narrow(&tokens));
    let name = format!("tokens:{}", path.display());
    let trained = |task| Trained {
        task,
        row_shape: vec![4],
        normalization: None,
        plan: FeaturePlan::default(),
        columns: None,
        label: None,
        needs_labels: true,
    };
    let next = |vocabulary| TaskSpec::NextToken {
        packed: false,
        vocabulary,
        are_bytes: false,
        tokenizer: None,
    };
    let with = |name: &str, task| DataRequest {
        trained: Some(trained(task)),
        ..request(name)
    };
    let data = opened(&with(&name, next(500)));
    assert_eq!(all_windows(&*data.train), expected(&tokens));
    assert_eq!(*data.train.task(), next(500));
    let table = file(&scratch, "a.csv", b"x,y\n1,0\n2,1\n");
    for (name, task, part) in [
        (name.as_str(), next(100), "the vocabulary of the model"),
        (
            &format!("{name},context=5"),
            next(500),
            "expected a context of 4",
        ),
        (
            &name,
            TaskSpec::numbered_classes(3),
            "expected rows of features",
        ),
        (
            table.to_str().unwrap(),
            next(500),
            "expected tokens, as the model was trained on",
        ),
    ] {
        let text = prepare(&with(name, task), &Alone).unwrap_err().to_string();
        assert!(text.contains(part), "{text}\n  lacks: {part}");
    }
    let mut damaged = with(&name, next(500));
    damaged.trained.as_mut().unwrap().row_shape = vec![2, 2];
    let text = prepare(&damaged, &Alone).unwrap_err().to_string();
    assert!(text.contains("the checkpoint is damaged"), "{text}");
}

#[test]
fn what_is_wrong_with_a_file_is_named_before_training() {
    let scratch = Scratch::new();
    let tokens = some(41);
    let llm = |name, format, count| llm_c(&scratch, name, format, &narrow(&tokens), count);
    llm("short.bin", GPT_2, 42);
    llm("long.bin", GPT_2, 40);
    llm("version.bin", [20240520, 2], 41);
    llm("none.bin", GPT_2, 0);
    file(&scratch, "header.bin", &20240520u32.to_le_bytes());
    file(&scratch, "odd.bin", &[1; 83]);
    file(&scratch, "plain.bin", &narrow(&tokens));
    file(&scratch, "tiny.txt", b"four");
    file(&scratch, "empty.txt", b"");
    npy(&scratch, "square.npy", "<u2", &[2, 2], &[0; 8]);
    npy(&scratch, "float.npy", "<f4", &[9], &[0; 36]);
    npy(
        &scratch,
        "below.npy",
        "<i8",
        &[5],
        &bytes(&[3, 2, -1, 3, 4], i64::to_le_bytes),
    );
    let shard = scratch.path().join("shard.bin");
    let about = About {
        vocabulary: Some(128),
        ..About::default()
    };
    write_shard(&shard, about, &[&tokens]).unwrap();
    let mut damaged = fs::read(&shard).unwrap();
    damaged[70] ^= 1;
    fs::write(&shard, damaged).unwrap();
    llm("mixed1.bin", GPT_2, 41);
    llm_c(&scratch, "mixed2.bin", LLAMA_3, &wide(&tokens), 41);
    for (name, part) in [
        ("short.bin", "it is cut short or damaged"),
        ("long.bin", "expected 1104 bytes, got 1106"),
        (
            "version.bin",
            "expected version 1 of llm.c's magic number 20240520, got 2",
        ),
        ("none.bin", "it is empty"),
        (
            "header.bin",
            "expected llm.c's header of 1024 bytes, got a file of 4",
        ),
        (
            "tokens:odd.bin",
            "expected tokens of 2 bytes (u16) without a header, got 83 bytes",
        ),
        (
            "plain.bin",
            "if they are u16 tokens, as nanoGPT writes them, give tokens:FILE",
        ),
        (
            "tiny.txt",
            "expected at least 5 tokens, one more than the context, got 4",
        ),
        ("empty.txt", "it is empty"),
        (
            "tokens:square.npy",
            "a one-dimensional array of integers, got u16[2, 2]",
        ),
        (
            "tokens:float.npy",
            "a one-dimensional array of integers, got f32[9]",
        ),
        (
            "tokens:below.npy",
            "token 2: expected a token, a number from 0 on, got -1",
        ),
        ("shard.bin", "the checksum of tokens"),
        (
            "tokens:plain.bin,vocabulary=5",
            "expected a token below 5, the option vocabulary",
        ),
        (
            "mixed?.bin",
            "mixed2.bin: expected GPT-2 tokens of llm.c (u16, vocabulary 50257), as in",
        ),
    ] {
        let name = match name.strip_prefix("tokens:") {
            Some(rest) => format!("tokens:{}/{rest}", scratch.path().display()),
            None => format!("{}/{name}", scratch.path().display()),
        };
        let error = prepare(&with_context(&name), &Alone).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.exit_code(), 65, "{text}");
        assert!(text.contains(part), "{text}\n  lacks: {part}");
    }
}

#[test]
fn settings_for_rows_of_features_are_refused() {
    let scratch = Scratch::new();
    let path = file(&scratch, "book.txt", b"a text of some bytes");
    let name = path.to_str().unwrap();
    let of = |change: &dyn Fn(&mut DataRequest)| {
        let mut request = with_context(name);
        change(&mut request);
        let error = prepare(&request, &Alone).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{error}");
        error.to_string()
    };
    let text = of(&|request| request.labels = Some("y".into()));
    assert!(
        text.contains("`labels`: expected rows with features as `data`, got tokens"),
        "{text}"
    );
    let text = of(&|request| request.normalize = Scaling::Unit);
    assert!(text.contains("leave out `normalize`"), "{text}");
    let text = of(&|request| request.context = None);
    assert!(
        text.contains("expected a context") && text.contains("tokens:"),
        "{text}"
    );
    let text = of(&|request| request.data = format!("tokens:{name},context=3").parse().unwrap());
    assert!(
        text.contains("expected a context of 4, which the model has, got 3"),
        "{text}"
    );
    // Rows to train on cannot be evaluated on tokens.
    let table = file(&scratch, "a.csv", b"x,y\n1,0\n2,1\n3,0\n");
    let text = of(&|request| {
        request.data = table.to_str().unwrap().parse().unwrap();
        request.val_data = Some(format!("tokens:{name}").parse().unwrap());
    });
    assert!(text.contains("expected rows of features"), "{text}");
}

#[test]
fn a_token_that_a_file_has_since_is_refused() {
    let scratch = Scratch::new();
    let tokens = some(41);
    let path = file(&scratch, "train.bin", &narrow(&tokens));
    let data = opened(&request(&format!(
        "tokens:{},context=4,vocabulary=128",
        path.display()
    )));
    let read = |row| read_rows(&*data.train, &[row]).map(|_| ());
    read(0).unwrap();
    let mut bytes = narrow(&tokens);
    bytes[2 * 8] = 128;
    // In place: the mapping sees it at once, the check of the file's times only later.
    fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut file| std::io::Write::write_all(&mut file, &bytes))
        .unwrap();
    // Token 8 is the last target of row 1 and the first input of row 2.
    for row in [1, 2] {
        let text = read(row).unwrap_err().to_string();
        assert!(text.contains("train.bin"), "{text}");
        assert!(
            text.contains("token 8: expected a token below 128") || text.contains("was written to"),
            "{text}"
        );
    }
}
