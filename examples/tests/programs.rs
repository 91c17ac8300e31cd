//! Programs that use the library train on two ranks, and a run that lost a rank resumes to the
//! model of an undisturbed run.

use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Longer than any wait here takes on a busy machine.
const WAIT_MAX: Duration = Duration::from_secs(100);
/// Steps of a run: some after the step in which ranks hold.
const STEPS: u64 = 300;

/// Ranks hold in a step after the first checkpoint, which is written meanwhile, until they are
/// killed.
const HOLDS: (&str, &str) = ("DDP_TEST_FAULT", "0:forward:150:hold,1:forward:150:hold");

/// An example, which `cargo test` has built beside this test.
fn program(name: &str) -> Command {
    let test = std::env::current_exe().unwrap();
    let path = test.ancestors().nth(2).unwrap().join("examples").join(name);
    assert!(path.exists(), "{}: build the examples", path.display());
    let mut command = Command::new(path);
    command.env("CUDA_VISIBLE_DEVICES", "").stdin(Stdio::null());
    command
}

/// A folder for runs, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let name = format!("ddp-examples-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

/// Waits until `found` finds something.
fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(start.elapsed() < WAIT_MAX, "waited for {what}");
        // Sleep: what is waited for is looked at.
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn has_checkpoint(run: &Path) -> bool {
    let folders = fs::read_dir(run.join("checkpoints")).into_iter().flatten();
    let mut states = folders
        .flatten()
        .map(|folder| folder.path().join("manifest.json"));
    states.any(|state| state.exists())
}

/// The processes that `parent` has started.
fn children(parent: u32) -> Vec<String> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let pids = fs::read_to_string(path).unwrap_or_default();
    pids.split_whitespace().map(String::from).collect()
}

fn kill(pid: &str) {
    let killed = Command::new("kill").args(["-KILL", pid]).status().unwrap();
    assert!(killed.success());
}

/// What a test has started. If it is dropped before its end, it is killed, with its ranks: those
/// that hold would outlive it.
struct Started(Child);

impl Started {
    /// How it ends, and what it says on standard error, which is a pipe.
    fn ended(mut self) -> (ExitStatus, String) {
        let mut said = String::new();
        let mut stderr = self.0.stderr.take().unwrap();
        stderr.read_to_string(&mut said).unwrap();
        (self.0.wait().unwrap(), said)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let pids = children(self.0.id()).into_iter();
            let pids = pids.chain([self.0.id().to_string()]);
            _ = Command::new("kill").arg("-KILL").args(pids).status();
            _ = self.0.wait();
        }
    }
}

fn ends_well(mut started: Started) {
    let status = started.0.wait().unwrap();
    assert!(status.success(), "{status}");
}

fn model(run: &Path, step: u64) -> Vec<u8> {
    let folder = run.join("checkpoints").join(format!("step-{step:08}"));
    fs::read(folder.join("model.safetensors")).unwrap()
}

#[test]
fn a_program_with_its_own_family_has_every_command_and_resumes_after_a_kill() {
    const RUN: &str = "--model mine,depth=3,width=24 --data glyphs,rows=512,held-out=64 \
                       --batch-size 32 --schedule constant --warmup-steps 0 --checkpoint-every 100 \
                       --progress never --ranks 2";
    let folder = Folder::new("my-train");
    let start = |run: &str, rest: &str, variables: &[(&str, &str)]| {
        let words = format!("{RUN} --steps {STEPS} {rest}");
        let mut command = program("my_train");
        command.envs(variables.iter().copied());
        command.args(words.split_whitespace()).arg("--out");
        Started(command.arg(folder.0.join(run)).spawn().unwrap())
    };
    let (whole, killed) = (folder.0.join("whole"), folder.0.join("killed"));
    ends_well(start("whole", "", &[]));

    let mut job = start("killed", "", &[HOLDS]);
    wait_for("a checkpoint", || has_checkpoint(&killed).then_some(()));
    let ranks = wait_for("two ranks", || {
        Some(children(job.0.id())).filter(|all| all.len() == 2)
    });
    kill(&ranks[1]);
    // That of the killed rank, also if the other one's end, with 77, is seen first.
    let status = job.0.wait().unwrap();
    assert_eq!(status.code(), Some(137), "{status}");
    ends_well(start("killed", "--resume auto", &[]));
    assert!(model(&whole, STEPS) == model(&killed, STEPS));

    let say = |words: &[&str]| {
        let output = program("my_train").args(words).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let out = whole.to_str().unwrap();
    let eval = say(&[
        "eval",
        "--checkpoint",
        out,
        "--data",
        "glyphs,rows=8,held-out=64",
    ]);
    assert!(eval.contains("accuracy"), "{eval}");
    assert!(say(&["inspect", out]).contains("my-train"));
    let verified = say(&["verify", out, "--from", "200", "--ranks", "2"]);
    assert!(verified.contains("as claimed: 100 steps"), "{verified}");
    let help = say(&["--help"]);
    assert!(
        help.contains("--depth <N>") && help.contains("my-train --ranks 2"),
        "{help}"
    );
    assert!(!help.contains("ddp-train"), "{help}");
    assert!(say(&["--version"]).starts_with("my-train "));
}

#[test]
fn a_transformer_by_its_formula_has_one_result_resumed_and_with_shared_optimizers() {
    const RUN: &str = "--model nanogpt,blocks=2,width=32,context=32,dropout=0.1 --batch-size 8 \
                       --schedule constant --warmup-steps 0 --progress never --ranks 2 --data";
    const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/text.txt");
    let folder = Folder::new("nanogpt");
    let train = |run: &str, rest: &str| {
        let words = RUN.split_whitespace().chain([TEXT]);
        let mut command = program("nanogpt");
        command.args(words.chain(rest.split_whitespace()));
        let run = folder.0.join(run);
        let started = command.arg("--out").arg(&run).spawn().unwrap();
        ends_well(Started(started));
        run
    };
    let whole = model(&train("whole", "--steps 20"), 20);
    train("resumed", "--steps 10");
    assert!(whole == model(&train("resumed", "--steps 20 --resume auto"), 20));
    assert!(whole == model(&train("shared", "--steps 20 --zero 1"), 20));
}

#[test]
fn a_transformer_by_its_formula_generates_what_its_training_samples() {
    const RUN: &str = "--model nanogpt,blocks=2,width=32,context=32 --data text.txt --steps 80 \
                       --batch-size 8 --lr 0.003 --schedule constant --warmup-steps 0 --seed 5 \
                       --progress never --ranks 2 --out run --sample one";
    const GENERATE: &str = "generate --checkpoint run --prompt one --seed 5";
    let folder = Folder::new("nanogpt-generates");
    let text = "one two three ".repeat(100);
    fs::write(folder.0.join("text.txt"), text).unwrap();
    let say = |words: &str| {
        let mut command = program("nanogpt");
        command.args(words.split_whitespace());
        let output = command.current_dir(&folder.0).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    say(RUN);
    let generated = say(GENERATE);
    let log = fs::read_to_string(folder.0.join("run/metrics.jsonl")).unwrap();
    let mut samples = log
        .lines()
        .filter(|line| line.contains("\"event\":\"sample\""));
    let sample = samples.next_back().expect("a sample");
    assert!(
        sample.contains(generated.trim_end()),
        "{sample}\n{generated}"
    );
    let learned = say(&format!("{GENERATE} --temperature 0"));
    assert!(learned.contains(" two three one two "), "{learned}");
}

#[test]
fn a_model_and_data_in_hand_train_on_two_ranks_and_resume_after_a_kill() {
    let folder = Folder::new("own-model");
    let start = |run: &str, holds: &[(&str, &str)]| {
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        [0, 1].map(|rank| {
            let mut command = program("own_model");
            command.arg(folder.0.join(run)).arg(STEPS.to_string());
            let variables = [
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", "2".into()),
                ("LOCAL_RANK", rank.to_string()),
                ("LOCAL_WORLD_SIZE", "2".into()),
                ("MASTER_ADDR", "127.0.0.1".into()),
                ("MASTER_PORT", port.to_string()),
                // It may be taken by now: rank 0 listens at the first free one of the next eight.
                ("TORCHELASTIC_USE_AGENT_STORE", "True".into()),
            ];
            command.envs(variables).envs(holds.iter().copied());
            Started(command.stderr(Stdio::piped()).spawn().unwrap())
        })
    };
    let (whole, killed) = (folder.0.join("whole"), folder.0.join("killed"));
    start("whole", &[]).into_iter().for_each(ends_well);

    let mut ranks = start("killed", &[HOLDS]);
    wait_for("a checkpoint", || has_checkpoint(&killed).then_some(()));
    kill(&ranks[1].0.id().to_string());
    assert!(!ranks[1].0.wait().unwrap().success());
    assert_eq!(ranks[0].0.wait().unwrap().code(), Some(77));
    let ended = start("killed", &[]).map(Started::ended);
    assert!(ended.iter().all(|it| it.0.success()), "{ended:?}");
    let said = &ended[0].1;
    assert!(said.contains("resuming after step "), "{said}");
    assert!(model(&whole, STEPS) == model(&killed, STEPS));
    let log = fs::read_to_string(killed.join("metrics.jsonl")).unwrap();
    assert!(
        log.contains("\"event\":\"resume\"") && log.contains("accuracy"),
        "{log}"
    );
}
