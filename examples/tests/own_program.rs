//! The program of docs/own-program.md is examples/points.rs, and two ranks of it learn.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

const PAGE: &str = include_str!("../../docs/own-program.md");
const PROGRAM: &str = include_str!("../points.rs");

/// The program of the page, in as many lines as it has there.
fn in_page() -> &'static str {
    let (_, program) = PAGE
        .split_once("```rust\n")
        .expect("the page has a program");
    program.split_once("```").expect("which ends").0
}

#[test]
fn the_program_of_the_page_is_short_and_is_the_example() {
    let lines = |text: &'static str| text.lines().filter(|line| !line.is_empty());
    assert!(lines(in_page()).count() <= 25);
    // rustfmt has its own opinion on where lines break.
    let words = |text: &'static str| {
        let text: String = lines(text)
            .filter(|line| !line.starts_with("//!"))
            .collect();
        text.replace(char::is_whitespace, "").replace(",)", ")")
    };
    assert_eq!(words(in_page()), words(PROGRAM));
}

#[test]
fn two_ranks_of_it_learn_the_same() {
    let tests = std::env::current_exe().unwrap();
    let built = tests.parent().and_then(Path::parent).unwrap();
    let program = built.join("examples/points");
    // `cargo test` builds examples, `cargo test --test own_program` does not.
    assert!(
        program.exists(),
        "build it: cargo build -p ddp-examples --example points"
    );
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let start = |rank: usize| -> Child {
        Command::new(&program)
            // The port may be taken by now: rank 0 listens at the first free one of the next eight.
            .env("TORCHELASTIC_USE_AGENT_STORE", "True")
            .envs([("MASTER_ADDR", "127.0.0.1"), ("WORLD_SIZE", "2")])
            .env("MASTER_PORT", port.to_string())
            .envs(["RANK", "LOCAL_RANK"].map(|name| (name, rank.to_string())))
            .env("LOCAL_WORLD_SIZE", "2")
            .env("CUDA_VISIBLE_DEVICES", "")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let ranks = [start(0), start(1)].map(|rank| rank.wait_with_output().unwrap());
    let said = |rank: &Output| {
        let [out, error] = [&rank.stdout, &rank.stderr].map(|text| String::from_utf8_lossy(text));
        assert!(rank.status.success(), "{out}{error}");
        out.trim()
            .strip_prefix("accuracy ")
            .expect(&out)
            .to_string()
    };
    let [one, other] = ranks.each_ref().map(said);
    assert_eq!(one, other);
    assert!(one.parse::<f64>().unwrap() > 0.95, "{one}");
}
