//! A failure on a GPU is an error that names the operation, the device and the line, and never a
//! hang, a panic or a silently wrong number. The simulator injects the failures; each case runs in
//! a separate process.

#[path = "faults/cases.rs"]
mod cases;

use std::process::Command;

use ddp_kernels::{Error, memory, stream};

use cases::{CASES, GPU};

/// Run by the test below, in a process of its own.
#[test]
#[ignore = "a part of what_goes_wrong_is_named"]
fn case() {
    let number: usize = std::env::var("DDP_TEST_CASE").unwrap().parse().unwrap();
    match (CASES[number].what)() {
        Ok(said) => println!("said: {said}"),
        Err(error) => println!("error: {error}"),
    }
    // What was dropped since goes to a device that may be lost: no panic, no hang.
    let _: Option<Error> = stream::synchronize(GPU).err();
    memory::empty_cache(GPU);
}

#[test]
fn what_goes_wrong_is_named() {
    if !ddp_tests::simulated_gpus(2) {
        return;
    }
    let mut wrong = Vec::new();
    for (number, case) in CASES.iter().enumerate() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "case",
            "--include-ignored",
            "--nocapture",
            "--test-threads=1",
        ]);
        let output = command
            .env("DDP_TEST_CASE", number.to_string())
            .env("SIMCUDA_FAULTS", case.plan)
            // What runs fails where the host waits; another schedule may show it in an earlier
            // call.
            .env("SIMCUDA_SCHEDULE", "lazy")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        if !output.status.success() || !text.contains("said: ") {
            wrong.push(format!("{number} {}: {text}", case.plan));
        } else if let Some(words) = case.words.iter().find(|&&words| !text.contains(words)) {
            wrong.push(format!(
                "{number} {}: {words:?} is not in {text}",
                case.plan
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n---\n"));
}
