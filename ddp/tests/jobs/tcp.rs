//! Ranks that meet over TCP by `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, without MPI:
//! they train as under `mpirun`, and one that fails, is missing or has another secret is named.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::support::job::{FAR, Folder, Job, QUICK, free_port, host};
use crate::support::processes::look_again_soon;

/// Ranks that a shell starts with these variables, each with what `of_rank` adds. The job's exit
/// code is that of rank 0.
pub(super) fn ranks(
    folder: &Folder,
    count: usize,
    words: &str,
    of_rank: &dyn Fn(usize) -> String,
) -> Job {
    let port = free_port();
    let place = format!("WORLD_SIZE={count} MASTER_ADDR=127.0.0.1 MASTER_PORT={port}");
    let mut script = format!("export {place}\n");
    for rank in 1..count {
        script += &format!("env RANK={rank} {} \"$@\" &\n", of_rank(rank));
    }
    script += &format!("export RANK=0 {}", of_rank(0));
    folder.in_shell(&script, words)
}

/// How long ranks wait for one that does not come: within this time the others start on a busy
/// machine.
const MISSING_S: u64 = 20;

/// Each rank claims to be on a different host.
fn on_hosts(rank: usize) -> String {
    format!("DDP_TEST_HOST=host{rank}")
}

fn plain(_: usize) -> String {
    String::new()
}

fn model(folder: &Folder) -> Vec<u8> {
    let path = folder.checkpoint(8).join("model.safetensors");
    std::fs::read(path).expect("the model was saved")
}

#[test]
fn ranks_on_one_host_and_on_several_train_to_the_same_bits() {
    let (one, several) = (Folder::new("tcp-one"), Folder::new("tcp-several"));
    let ended = ranks(&one, 3, QUICK, &plain).run();
    ended.assert_well();
    assert_eq!(one.metrics_log().start()["world"]["ranks"], 3);
    let ended = ranks(&several, 3, QUICK, &on_hosts).run();
    ended.assert_well();
    assert_eq!(several.metrics_log().start()["world"]["ranks"], 3);
    assert!(model(&one) == model(&several), "hosts change the bits");
    #[cfg(feature = "mpi")]
    {
        let mpirun = Folder::new("tcp-mpirun");
        mpirun.ranks(3, QUICK).run().assert_well();
        assert!(model(&one) == model(&mpirun), "mpirun changes the bits");
    }
}

#[test]
fn with_same_bits_hosts_of_uneven_ranks_train_the_model_of_one_rank() {
    let settings = [
        "--zero 1 --grad-clip 1",
        "--reduce-dtype bf16 --bucket-mb 0.01",
        "--bucket-mb 0.002",
    ];
    for settings in ddp_testing::cases_of("same bits on uneven hosts", settings, 1) {
        let words = format!("{QUICK} --same-bits 12 {settings}");
        let one = Folder::new("same-bits-one");
        one.alone(&words).run().assert_well();
        for hosts in [&[0, 0, 0, 1][..], &[0, 1, 1, 2]] {
            let several = Folder::new("same-bits-hosts");
            let host = |rank: usize| format!("DDP_TEST_HOST=host{}", hosts[rank]);
            ranks(&several, hosts.len(), &words, &host)
                .run()
                .assert_well();
            assert!(model(&one) == model(&several), "{hosts:?}, {settings}");
        }
        #[cfg(feature = "mpi")]
        {
            let mpirun = Folder::new("same-bits-mpirun");
            let hosts = ["a", "a", "a", "b"];
            mpirun.on_hosts(&hosts, &words).run().assert_well();
            assert!(model(&one) == model(&mpirun), "mpirun, {settings}");
        }
    }
}

#[test]
fn a_killed_rank_ends_all_and_is_named_on_its_host_and_on_others() {
    for (place, host) in [(plain as fn(usize) -> String, ""), (on_hosts, " on host1")] {
        let folder = Folder::new("tcp-killed");
        let words = format!("{QUICK} {FAR}");
        let job = ranks(&folder, 3, &words, &place);
        let ended = job.env("DDP_TEST_FAULT", "1:optimizer:3:kill").run();
        let causes = ended.causes();
        assert_eq!(ended.exit_code(), Some(77), "{ended}");
        let named = format!("ddp-train: rank 1{host}");
        assert!(
            causes.iter().all(|cause| cause.starts_with(&named)),
            "{ended}"
        );
        assert!(!causes.is_empty() && causes.len() <= 2, "{ended}");
    }
}

#[test]
fn an_error_of_one_host_is_reported_once_and_ends_all_with_its_code() {
    let folder = Folder::new("tcp-error");
    let words = format!("{QUICK} {FAR}");
    let job = ranks(&folder, 3, &words, &on_hosts);
    let ended = job.env("DDP_TEST_FAULT", "2:optimizer:3:error").run();
    let cause = ended.assert_fails(65);
    assert!(
        cause.starts_with("ddp-train: rank 2 on host2: a fault on purpose"),
        "{ended}"
    );
}

#[test]
fn a_missing_rank_is_named_by_rank_0() {
    let folder = Folder::new("tcp-missing");
    let absent = |rank: usize| match rank {
        2 => "true".to_string(),
        _ => String::new(),
    };
    let ended = ranks(
        &folder,
        3,
        &format!("{QUICK} --timeout-s {MISSING_S}"),
        &absent,
    )
    .run();
    let cause = ended.assert_fails(77);
    assert!(
        cause.contains("rank 2 did not come to 127.0.0.1:"),
        "{ended}"
    );
    assert!(
        cause.contains(&format!("within {MISSING_S} s")) && cause.contains("--timeout-s"),
        "{ended}"
    );
}

#[test]
fn a_rank_with_another_secret_is_refused_and_says_so() {
    let folder = Folder::new("tcp-secret");
    let secret = |rank: usize| format!("DDP_JOB_SECRET=secret-of-16-bytes-{}", rank / 2);
    let ended = ranks(
        &folder,
        3,
        &format!("{QUICK} --timeout-s {MISSING_S}"),
        &secret,
    )
    .run();
    assert_eq!(ended.exit_code(), Some(77), "{ended}");
    let causes = ended.causes();
    let [warned, refused, missing] = ["warning: rank 2", "rank 2", "rank 0"].map(|of| {
        let line = causes
            .iter()
            .find(|it| it.starts_with(&format!("ddp-train: {of} ")));
        *line.unwrap_or_else(|| panic!("{of} says why: {ended}"))
    });
    let told = "was refused: rank 2, as it says: it has another secret";
    assert!(missing.contains("rank 2 did not come"), "{ended}");
    assert!(missing.contains(told), "{ended}");
    // In the log at once, and in the error.
    assert_eq!(ended.stderr.matches(told).count(), 2, "{ended}");
    for line in [warned, refused] {
        assert!(
            line.contains("it has another secret; help: set the same DDP_JOB_SECRET"),
            "{ended}"
        );
    }
}

/// Each rank has its own home folder, as hosts may have.
#[test]
fn ranks_whose_keys_differ_say_how_to_copy_one_and_train_once_it_is_copied() {
    let folder = Folder::new("tcp-keys");
    let home = |rank: usize| format!("HOME=$PWD/home{rank}");
    let words = format!("{QUICK} --timeout-s {MISSING_S}");
    let ended = ranks(&folder, 2, &words, &home).run();
    assert_eq!(ended.exit_code(), Some(77), "{ended}");
    let line = "copy the key of 127.0.0.1, if you trust it: scp 127.0.0.1:.config/ddp-train/key ~/";
    for cause in ended.causes() {
        assert!(cause.contains("it has another secret"), "{ended}");
        assert!(cause.contains(line), "{ended}");
    }
    assert_eq!(ended.causes().len(), 3, "a warning and two errors: {ended}");
    let key = |rank: usize| {
        folder
            .path()
            .join(format!("home{rank}/.config/ddp-train/key"))
    };
    std::fs::copy(key(0), key(1)).unwrap();
    ranks(&folder, 2, QUICK, &home).run().assert_well();
}

/// Whoever answers at MASTER_ADDR:MASTER_PORT could be the launcher of an agent.
#[test]
fn a_stranger_who_is_no_launcher_starts_nothing_on_an_agent() {
    let folder = Folder::new("tcp-no-launcher");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let ran = folder.path().join("ran");
    let program = folder.script("evil", &format!("#!/bin/sh\ntouch '{}'\n", ran.display()));
    let job = folder.alone(&format!("{QUICK} --min-ranks 1"));
    let job = job
        .env("RANK", "1")
        .env("WORLD_SIZE", "2")
        .env("MASTER_PORT", &port);
    let job = job.env("MASTER_ADDR", "127.0.0.1");
    let agent = job
        .env("HOME", &folder.path().display().to_string())
        .start();
    for _ in 0..2 {
        let (mut socket, _) = listener.accept().unwrap();
        let call: serde_json::Value = serde_json::from_slice(&frame_from(&mut socket)).unwrap();
        // The answers of a rank 0 that does not know the secret.
        let number = "0".repeat(64);
        let said = serde_json::json!([call[0], call[1], number, false]);
        frame_to(&mut socket, said.to_string().as_bytes());
        let proof = String::from_utf8(frame_from(&mut socket)).unwrap();
        let proof: serde_json::Value = serde_json::from_str(&proof).unwrap();
        let said = serde_json::json!(["welcome", proof[0]]);
        frame_to(&mut socket, said.to_string().as_bytes());
        let version = env!("CARGO_PKG_VERSION");
        let setup = serde_json::json!({"Prepare": {
            "version": version, "directory": folder.path(), "arguments": [], "size": 2,
            "environment": [["LD_PRELOAD", program]],
            "grace": {"secs": 1, "nanos": 0}, "silence": {"secs": 60, "nanos": 0},
        }});
        let start = serde_json::json!({"Start": [1, 1, [["LD_PRELOAD", program]]]});
        for order in [setup, start] {
            // As lines, and as frames: the agent reads neither, and closes.
            _ = socket.write_all(format!("{order}\n").as_bytes());
        }
        _ = socket.read_to_end(&mut Vec::new());
    }
    agent.wait_for_said("it has another secret");
    agent.signal("TERM");
    let ended = agent.wait();
    assert!(!ran.exists(), "{ended}");
}

fn frame_from(socket: &mut TcpStream) -> Vec<u8> {
    let mut length = [0; 4];
    socket.read_exact(&mut length).unwrap();
    let mut message = vec![0; u32::from_le_bytes(length) as usize];
    socket.read_exact(&mut message).unwrap();
    message
}

fn frame_to(socket: &mut TcpStream, message: &[u8]) {
    let length = (message.len() as u32).to_le_bytes();
    socket.write_all(&[&length, message].concat()).unwrap();
}

#[test]
fn agents_refuse_to_work_without_a_secret() {
    let folder = Folder::new("tcp-agents-open");
    for rank in ["0", "1"] {
        let job = folder.alone(&format!("{QUICK} --min-ranks 1"));
        let job = job
            .env("RANK", rank)
            .env("WORLD_SIZE", "2")
            .env("MASTER_PORT", "9");
        let job = job.env("MASTER_ADDR", "127.0.0.1");
        let ended = job.env("DDP_JOB_SECRET", "none").run();
        let cause = ended.assert_fails(2);
        let told = "DDP_JOB_SECRET=none would let anybody on the network give them orders";
        assert!(cause.contains(told), "{ended}");
    }
}

#[test]
fn a_trusted_network_needs_no_key_and_one_rank_makes_macs_cover_all() {
    let folder = Folder::new("tcp-open");
    let open = |rank: usize| {
        let all = ["", "DDP_JOB_MAC=all"][rank];
        format!("HOME=/nowhere DDP_JOB_SECRET=none {all} {}", on_hosts(rank))
    };
    ranks(&folder, 2, QUICK, &open).run().assert_well();
    let folder = Folder::new("tcp-no-home");
    let ended = ranks(&folder, 2, QUICK, &|_| "HOME=/proc".into()).run();
    assert_eq!(ended.exit_code(), Some(2), "{ended}");
    for cause in ended.causes() {
        assert!(
            cause.contains("the key /proc/.config/ddp-train/key: "),
            "{ended}"
        );
        assert!(cause.contains("openssl rand -hex 32"), "{ended}");
    }
}

#[test]
fn ranks_with_different_world_sizes_both_say_so_with_their_names() {
    let folder = Folder::new("tcp-sizes");
    let size = |rank: usize| format!("WORLD_SIZE={}", 2 + rank);
    let ended = ranks(
        &folder,
        2,
        &format!("{QUICK} --timeout-s {MISSING_S}"),
        &size,
    )
    .run();
    assert_eq!(ended.exit_code(), Some(77), "{ended}");
    for (rank, told) in [
        (0, "it is rank 1 of another job (of 3 ranks, not 2)"),
        (1, "another job (of 2 ranks, not 3) listens there"),
    ] {
        let named = format!("ddp-train: rank {rank} on {}: cannot bring ", host());
        let causes = ended.causes();
        let cause = causes.iter().find(|cause| cause.starts_with(&named));
        assert!(cause.is_some_and(|cause| cause.contains(told)), "{ended}");
    }
}

#[test]
fn strangers_on_the_port_do_no_harm() {
    let folder = Folder::new("tcp-strangers");
    let port = free_port();
    let late = |rank: usize| match rank {
        // The other rank waits for this one while strangers come.
        1 => format!(
            "MASTER_PORT={port} sh -c 'until [ -e came ]; do sleep 0.1; done; exec \"$@\"' sh"
        ),
        _ => format!("MASTER_PORT={port}"),
    };
    let job = ranks(&folder, 2, QUICK, &late).start();
    let started = Instant::now();
    let mut strangers = Vec::new();
    while strangers.len() < 3 && started.elapsed() < Duration::from_secs(60) {
        if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
            let said = [&b"GET / HTTP/1.1\r\n\r\n"[..], &[1], b"\x03\0\0\0[1]"];
            _ = stream.write_all(said[strangers.len()]);
            strangers.push(stream);
        }
        look_again_soon();
    }
    std::fs::write(folder.path().join("came"), "").unwrap();
    job.wait().assert_well();
    assert_eq!(strangers.len(), 3);
}

#[test]
fn variables_that_make_no_sense_end_the_process_with_2() {
    let folder = Folder::new("tcp-variables");
    for (name, value, told) in [
        ("MASTER_PORT", "x", "MASTER_PORT: expected a free port"),
        (
            "WORLD_SIZE",
            "1000000000",
            "WORLD_SIZE: expected a whole number from 1 to 512",
        ),
        (
            "DDP_JOB_SECRET",
            "",
            "DDP_JOB_SECRET: expected at least 16 bytes, got 0",
        ),
    ] {
        let job = folder.alone(QUICK).env("RANK", "0").env("WORLD_SIZE", "2");
        let job = job.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", "9");
        let ended = job.env(name, value).run();
        let cause = ended.assert_fails(2);
        assert!(cause.contains(told), "{ended}");
    }
}
