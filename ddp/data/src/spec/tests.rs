//! What names of data mean.

use super::*;
use ddp_kernels::files::testing::Scratch;

#[test]
fn a_spec_reads_back_as_it_prints() {
    for text in [
        "glyphs",
        "glyphs,rows=7,held-out=0,seed=9",
        "synthetic:classification,rows=1000000000000,features=784,classes=2,noise=0.25",
        "synthetic:regression,outputs=3,seed=9223372036854775807",
        "digits.npz#x_train",
        "shards/*.npy",
        "tokens:train.bin",
        "tokens:shards/*.bin,context=64,vocabulary=50304",
        "tokens:train.bin,type=u16",
        "tokens:train.bin,vocabulary=128256,type=u32",
    ] {
        let spec: DataSpec = text.parse().unwrap();
        assert_eq!(
            spec.to_string().parse::<DataSpec>().unwrap(),
            spec,
            "{spec}"
        );
        assert!(
            text.split(',')
                .all(|part| spec.to_string().split(',').any(|printed| printed == part)),
            "{spec}"
        );
    }
}

#[test]
fn a_path_may_have_the_sign_that_stands_before_a_part() {
    let scratch = Scratch::new();
    let folder = scratch.path().join("M#1");
    std::fs::create_dir(&folder).unwrap();
    std::fs::create_dir(scratch.path().join("M")).unwrap();
    std::fs::write(folder.join("a#b.csv"), "").unwrap();
    std::fs::write(folder.join("d.npz"), "").unwrap();
    for (name, part) in [
        ("", None),
        ("/a#b.csv", None),
        ("/a#b.csv", Some("x")),
        ("/d.npz", Some("encoder/x")),
        ("/d.npz", None),
        ("/*.npz", None),
        ("/*.npz", Some("encoder/x")),
    ] {
        let path = format!("{}{name}", folder.display());
        let text = part.map_or(path.clone(), |part| format!("{path}#{part}"));
        assert_eq!(
            FilesSpec::split(&text),
            FilesSpec {
                path,
                part: part.map(String::from)
            },
            "{text}"
        );
    }
    for (text, part) in [
        ("absent.npz#x", Some("x")),
        ("absent#1/d.csv", None),
        ("#x", None),
        ("a.npz#", None),
    ] {
        assert_eq!(FilesSpec::split(text).part.as_deref(), part, "{text}");
    }
}

#[test]
fn invalid_values_are_refused_with_the_valid_ones() {
    for (text, parts) in [
        (
            "synthetic:mnist",
            &["got \"synthetic:mnist\"", "glyphs"][..],
        ),
        (
            "glyphs,rows=0",
            &["rows: expected a whole number from 1 to", "got \"0\""],
        ),
        (
            "glyphs,rows=1e3",
            &["rows: expected a whole number", "got \"1e3\""],
        ),
        (
            "glyphs,classes=3",
            &["options rows, held-out, seed, got \"classes\""],
        ),
        ("glyphs,rows", &["NAME=VALUE", "got \"rows\""]),
        ("glyphs,rows=3,rows=4", &["given twice"]),
        (
            "synthetic:regression,classes=3",
            &["outputs", "got \"classes\""],
        ),
        (
            "synthetic:regression,noise=nan",
            &["noise: expected a number from 0 to 100", "got \"nan\""],
        ),
        (
            "synthetic:classification,classes=1",
            &["classes: expected a whole number from 2", "got \"1\""],
        ),
        ("", &["got \"\""]),
        (
            "tokens:",
            &["expected a path, tokens:PATH", "got \"tokens:\""],
        ),
        (
            "tokens:a.bin,context=0",
            &["context: expected a whole number from 1 to 16777216, got \"0\""],
        ),
        (
            "tokens:a.bin,window=3",
            &["options context, vocabulary, type, got \"window\""],
        ),
    ] {
        let error = text.parse::<DataSpec>().unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let message = error.to_string();
        assert!(
            message.starts_with(&format!("`data` {text}: ")),
            "{message}"
        );
        parts
            .iter()
            .for_each(|part| assert!(message.contains(part), "{message} lacks {part}"));
    }
}
