//! Starts `ddp-train` and reports how it ended.
//!
//! Every job has a mark in the environment of all its processes: that identifies them, whoever
//! their parent is. After each job none of its processes may be left, and nothing in /dev/shm.
//! Waits here check for what they wait for, and fail with the job's output if the job ends before,
//! or after a long time limit.

use std::collections::BTreeSet;
use std::fmt;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::support::metrics_log::MetricsLog;
use crate::support::processes::*;
use crate::support::random::mixed;

/// The end of patience, longer than any job here takes on a busy machine: one that hangs is ended,
/// and its test fails. No measure.
const RUN_MAX: Duration = Duration::from_secs(300);
/// A `--timeout-s` for failures that need no timeout to be noticed: patience ends before it does.
pub(crate) const FAR: &str = "--timeout-s 3600";
/// How long a launcher whose ranks are gone may wait for its lock: what it deadlocks on has no end.
const LOCKED_MAX: Duration = Duration::from_secs(5);

/// The end of step 2 in the metrics log.
pub(crate) const STEP_2: &str = r#"{"event":"step","step":2,"#;

/// A run that is quick: 8 steps. The word OUT becomes the folder of the run.
pub(crate) const QUICK: &str = "--data glyphs,rows=256,held-out=64 --hidden 16 --batch-size 32 --epochs 1 --log-every 1 --out OUT";

/// The program: where it was built, unless it is said to be elsewhere now.
pub(crate) fn program() -> String {
    std::env::var("DDP_TRAIN").unwrap_or_else(|_| env!("CARGO_BIN_EXE_ddp-train").to_string())
}

/// Hides real and simulated GPUs: tests on the CPU must not depend on the machine's hardware.
const WITHOUT_GPUS: [(&str, &str); 2] = [("CUDA_VISIBLE_DEVICES", ""), ("SIMCUDA_DEVICES", "0")];

/// Where processes have the mark of their job.
const MARK: &str = "DDP_JOB_MARK";

/// A folder for the jobs of one test, removed with everything in it.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        static FOLDERS: AtomicUsize = AtomicUsize::new(0);
        // Of one width, so that no path is the beginning of another.
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!(
            "ddp-jobs-{}-{number:04}-{name}",
            std::process::id()
        ));
        std::fs::create_dir(&path).expect("the temporary folder can be written");
        Folder(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Where its runs go.
    pub(crate) fn out(&self) -> PathBuf {
        self.0.join("out")
    }

    /// One process, with these arguments.
    pub(crate) fn alone(&self, words: &str) -> Job {
        self.job(Command::new(program()), words, false)
    }

    /// One process that a shell becomes after `before`.
    pub(crate) fn in_shell(&self, before: &str, words: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{before}\nexec \"$@\""), "sh", &program()]);
        self.job(command, words, false)
    }

    /// Ranks under `mpirun`, or started by the program itself: DDP_TEST_LAUNCHER says which.
    pub(crate) fn ranks(&self, count: usize, words: &str) -> Job {
        #[cfg(feature = "mpi")]
        if std::env::var("DDP_TEST_LAUNCHER").as_deref() != Ok("own") {
            return self.each(&[(count, words)]);
        }
        self.started(count, words)
    }

    /// Ranks that the program itself starts.
    pub(crate) fn started(&self, count: usize, words: &str) -> Job {
        let words = format!("{words} --ranks {count}");
        self.job(Command::new(program()), &words, true)
    }

    /// Ranks that the program starts on hosts, as in `--hosts a:2,b:1`, which are names of this
    /// machine: instead of ssh a script runs that begins with `script`.
    pub(crate) fn started_on(&self, hosts: &str, script: &str, words: &str) -> Job {
        let ssh = self.script(
            "ssh.sh",
            &format!(
                "host=$1; shift\n{script}\n\
                 export SSH_CONNECTION='127.0.0.1 1 127.0.0.1 2' DDP_TEST_HOST=$host\nexec sh -c \"$*\""
            ),
        );
        let job = self.job(Command::new(program()), &format!("{words} {hosts}"), true);
        job.env("DDP_SSH", ssh.to_str().expect("the folder's name is UTF-8"))
    }

    /// Ranks under `mpirun`: this many with these words, that many with those.
    #[cfg(feature = "mpi")]
    pub(crate) fn each(&self, parts: &[(usize, &str)]) -> Job {
        let parts: Vec<_> = parts
            .iter()
            .map(|(count, words)| (format!("-n {count}"), *words))
            .collect();
        self.under_mpirun("--bind-to none", &parts)
    }

    /// Ranks under `mpirun`, one in each of these folders below this one, all with these words.
    #[cfg(feature = "mpi")]
    pub(crate) fn in_folders(&self, names: &[&str], words: &str) -> Job {
        let place = |name: &&str| (format!("-n 1 -wdir {}", self.0.join(name).display()), words);
        self.under_mpirun(
            "--bind-to none",
            &names.iter().map(place).collect::<Vec<_>>(),
        )
    }

    /// Ranks under `mpirun`, as it binds them by itself.
    #[cfg(feature = "mpi")]
    pub(crate) fn bound_ranks(&self, count: usize, words: &str) -> Job {
        self.under_mpirun("", &[(format!("-n {count}"), words)])
    }

    /// A rank on each of these hosts, in a folder named after the host: one machine stands in for
    /// several. Relative paths in `words` are per host.
    #[cfg(feature = "mpi")]
    pub(crate) fn on_hosts(&self, hosts: &[&str], words: &str) -> Job {
        let mut command = mpirun();
        command.args(["--oversubscribe", "--bind-to", "none"]);
        for (index, host) in hosts.iter().enumerate() {
            if index > 0 {
                command.arg(":");
            }
            let folder = self.0.join(host);
            std::fs::create_dir_all(&folder).expect("the temporary folder can be written");
            command.args(["-n", "1", "-wdir"]).arg(folder).args([
                "-x",
                &format!("DDP_TEST_HOST={host}"),
                &program(),
            ]);
            command.args(self.words(words));
        }
        command
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        self.job(command, "", true)
    }

    /// Ranks under `mpirun`; each runs its own program, with these words.
    #[cfg(feature = "mpi")]
    pub(crate) fn programs(&self, programs: &[&Path], words: &str) -> Job {
        let mut command = mpirun();
        command.args(["--oversubscribe", "--bind-to", "none"]);
        for program in programs {
            command.args(["-n", "1"]).arg(program);
            command.args(self.words(words)).arg(":");
        }
        command
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        self.job(command, "", true)
    }

    /// A program in this folder that does `before` and then becomes `ddp-train`.
    #[cfg(feature = "mpi")]
    pub(crate) fn program_after(&self, name: &str, before: &str) -> PathBuf {
        self.script(name, &format!("{before}\nexec {} \"$@\"", program()))
    }

    /// An executable shell script in this folder.
    pub(crate) fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        ddp_slice::write_executable(&path, format!("#!/bin/sh\n{text}\n").as_bytes());
        path
    }

    #[cfg(feature = "mpi")]
    fn under_mpirun(&self, options: &str, parts: &[(String, &str)]) -> Job {
        let mut command = mpirun();
        command
            .arg("--oversubscribe")
            .args(options.split_whitespace());
        for (index, (place, words)) in parts.iter().enumerate() {
            if index > 0 {
                command.arg(":");
            }
            command
                .args(place.split_whitespace())
                .arg(program())
                .args(self.words(words));
        }
        // Test machines are often containers, in which everybody is root.
        command
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        self.job(command, "", true)
    }

    /// Two ranks.
    pub(crate) fn together(&self, words: &str) -> Job {
        self.ranks(2, words)
    }

    fn words(&self, words: &str) -> Vec<String> {
        let out = self.out().display().to_string();
        words
            .split_whitespace()
            .map(|word| word.replace("OUT", &out))
            .collect()
    }

    fn job(&self, mut command: Command, words: &str, of_ranks: bool) -> Job {
        command.args(self.words(words));
        let mut command = hearing_all_signals(command);
        command.current_dir(&self.0);
        // What these tests were started under is not what their jobs are started under.
        let others = [
            "SLURM_",
            "OMPI_COMM_",
            "PMI",
            "PBS_",
            "WORLD_SIZE",
            "RANK",
            "MASTER_",
            "DDP_JOB",
            "DDP_TEST_",
            "RUST_BACKTRACE",
            "RUST_LIB_",
        ];
        for (name, _) in std::env::vars_os() {
            if others
                .iter()
                .any(|other| name.to_string_lossy().starts_with(other))
            {
                command.env_remove(name);
            }
        }
        command.envs(WITHOUT_GPUS);
        Job {
            command,
            folder: self.0.clone(),
            of_ranks,
        }
    }

    /// The metrics log of the run in `out`, every line of which parses.
    pub(crate) fn metrics_log(&self) -> MetricsLog {
        MetricsLog::read(&self.out())
    }

    /// The files below the folder with their bytes and modification times; folders have no bytes.
    pub(crate) fn tree(&self) -> Vec<(PathBuf, Option<Vec<u8>>, std::time::SystemTime)> {
        let mut tree = Vec::new();
        let mut folders = vec![self.0.clone()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("it is there") {
                let path = entry.expect("it can be listed").path();
                let about = path.metadata().expect("it is there");
                let bytes = about
                    .is_file()
                    .then(|| std::fs::read(&path).expect("it can be read"));
                if bytes.is_none() {
                    folders.push(path.clone());
                }
                tree.push((
                    path,
                    bytes,
                    about.modified().expect("the file system keeps times"),
                ));
            }
        }
        tree.sort();
        tree
    }

    /// The checkpoint of a step of the run in `out`.
    pub(crate) fn checkpoint(&self, step: u64) -> PathBuf {
        self.out().join(format!("checkpoints/step-{step:08}"))
    }

    /// Flips a bit in the middle of the model that was saved after a step.
    pub(crate) fn damage_model(&self, step: u64) {
        let path = self.checkpoint(step).join("model.safetensors");
        let mut bytes = std::fs::read(&path).expect("the model was saved");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
        std::fs::write(&path, bytes).expect("the folder can be written");
    }

    /// The names in the folder of checkpoints; none if there is no such folder.
    pub(crate) fn checkpoints(&self) -> Vec<String> {
        names_in(&self.out().join("checkpoints"))
            .into_iter()
            .collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A job that is to be started.
pub(crate) struct Job {
    command: Command,
    folder: PathBuf,
    of_ranks: bool,
}

/// A job that runs. Dropped before it has ended, it is killed, with all that it started.
pub(crate) struct Running {
    child: Mutex<Child>,
    /// Of the process that was started: of ranks, of their launcher.
    pid: u32,
    said: [Said; 2],
    folder: PathBuf,
    /// What the environment of its processes has.
    mark: String,
    shared_before: BTreeSet<String>,
    /// Whether nothing of it is left.
    is_over: bool,
    turn: Option<Turn>,
    _sessions: Folder,
}

/// What a job has printed so far, and the thread that reads it.
struct Said {
    bytes: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Said {
    fn of(pipe: Option<impl Read + Send + 'static>) -> Said {
        let bytes = Arc::<Mutex<Vec<u8>>>::default();
        let (mut pipe, all) = (pipe.expect("it is a pipe"), Arc::clone(&bytes));
        let reader = std::thread::spawn(move || {
            let mut part = [0; 1 << 16];
            while let Ok(count @ 1..) = pipe.read(&mut part) {
                let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
                all.extend_from_slice(&part[..count]);
            }
        });
        Said { bytes, reader }
    }

    fn text(&self) -> String {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// A job that has ended.
pub(crate) struct Ended {
    status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Job {
    pub(crate) fn env(mut self, name: &str, value: &str) -> Job {
        self.command.env(name, value);
        self
    }

    /// Lets it see the GPUs that this process may see.
    #[allow(dead_code, reason = "the tests on the CPU have no use for it")]
    pub(crate) fn on_gpus(mut self) -> Job {
        for (name, _) in WITHOUT_GPUS {
            match std::env::var_os(name) {
                Some(value) => self.command.env(name, value),
                None => self.command.env_remove(name),
            };
        }
        self
    }

    pub(crate) fn start(mut self) -> Running {
        let turn = self.of_ranks.then(Turn::wait_for);
        // Jobs may run in one folder at the same time. Of one width: no mark begins another.
        static JOBS: AtomicUsize = AtomicUsize::new(0);
        let number = JOBS.fetch_add(1, Ordering::Relaxed);
        let mark = format!("{}#{number:06}", self.folder.display());
        self.command.env(MARK, &mark);
        // Launchers that start and end at the same time may remove each other's session folder
        // (Open MPI 4.1: "File exists").
        let sessions = Folder::new("mpirun");
        self.command
            .env("OMPI_MCA_orte_tmpdir_base", sessions.path());
        let shared_before = names_in(Path::new("/dev/shm"));
        let piped = self
            .command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = piped.spawn().expect("there is a program env");
        Running {
            said: [Said::of(child.stdout.take()), Said::of(child.stderr.take())],
            pid: child.id(),
            child: Mutex::new(child),
            folder: self.folder,
            mark,
            shared_before,
            is_over: false,
            turn,
            _sessions: sessions,
        }
    }

    /// Starts it, and waits for its end.
    #[track_caller]
    pub(crate) fn run(self) -> Ended {
        self.start().wait()
    }
}

impl Running {
    /// Waits until `is_so`. Fails with the job's output if the job ends before that.
    #[track_caller]
    pub(crate) fn wait_until(&self, what: &str, is_so: impl Fn() -> bool) {
        let started = Instant::now();
        loop {
            // In this order: what is so when the job ends counts.
            let status = self.status();
            if is_so() {
                return;
            }
            if status.is_some() || started.elapsed() > RUN_MAX {
                let ended = self.end();
                panic!("waited for {what} until the job had ended, or for {RUN_MAX:?}: {ended}");
            }
            look_again_soon();
        }
    }

    /// Waits until step 2 is in the metrics log.
    #[track_caller]
    pub(crate) fn wait_for_step_2(&self) {
        self.wait_for_line(STEP_2);
    }

    /// Waits until there is a line in the metrics log that has `part`.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, part: &str) {
        self.wait_for_line(part);
    }

    #[track_caller]
    fn wait_for_line(&self, part: &str) {
        let log = self.folder.join("out/metrics.jsonl");
        let text = || std::fs::read_to_string(&log).unwrap_or_default();
        self.wait_until(part, || text().contains(part));
    }

    /// Waits until it has printed `part` on standard error.
    #[track_caller]
    pub(crate) fn wait_for_said(&self, part: &str) {
        self.wait_until(part, || self.said[1].text().contains(part));
    }

    /// Waits until a rank has come to this fault, as in `1:forward:3`, of a kind that lasts.
    #[track_caller]
    pub(crate) fn wait_for_fault(&self, at: &str) {
        self.wait_for_said(&format!("at {at}\n"));
    }

    /// Waits until it has printed `part` on standard output.
    #[track_caller]
    pub(crate) fn wait_for_printed(&self, part: &str) {
        self.wait_until(part, || self.said[0].text().contains(part));
    }

    /// Waits until its folder has a file of this name.
    #[track_caller]
    pub(crate) fn wait_for_file(&self, name: &str) {
        let path = self.folder.join(name);
        self.wait_until(name, || path.exists());
    }

    /// Waits until rank `rank` has a process that is not `before`. Returns it.
    #[track_caller]
    pub(crate) fn wait_for_process(&self, rank: usize, before: Option<u32>) -> u32 {
        let find = || {
            let mut all = self.ranks().into_iter();
            let found = all.find(|it| it.0 == rank && Some(it.1) != before);
            found.map(|it| it.1)
        };
        loop {
            self.wait_until(&format!("a process of rank {rank}"), || find().is_some());
            if let Some(pid) = find() {
                return pid;
            }
        }
    }

    /// Lets ranks continue that hold at a fault of this step.
    pub(crate) fn go_on(&self, step: u64) {
        let path = self.folder.join(format!("go-on-{step}"));
        std::fs::write(path, "").expect("the folder can be written");
    }

    /// Sends a signal such as `TERM` to a rank and waits until it is delivered; without a launcher,
    /// to the process itself. Does nothing if the process has ended.
    pub(crate) fn signal_rank(&self, rank: usize, signal: &str) {
        let pid = match self.turn {
            Some(_) => self.ranks().into_iter().find(|(known, _)| *known == rank),
            None => Some((0, self.pid)),
        };
        pid.into_iter()
            .for_each(|(_, pid)| self.deliver(signal, pid));
    }

    fn deliver(&self, signal: &str, pid: u32) {
        send(signal, &[pid]);
        // Signals that wait together come in any order: the kernel lets the last one in first.
        self.wait_until("the signal's delivery", || !has_pending_signals(pid));
    }

    /// Sends a signal to the agents that start ranks on other hosts. How many there are.
    pub(crate) fn signal_agents(&self, signal: &str) -> usize {
        let mut agents = processes_of(&self.mark);
        agents.retain(|pid| {
            let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            words.ends_with(b"ddp-train\0host-agent\0")
        });
        send(signal, &agents);
        agents.len()
    }

    /// The processes of its ranks, by rank.
    pub(crate) fn ranks(&self) -> Vec<(usize, u32)> {
        let rank_of = |pid: u32| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
            let mut variables = environment.split(|&byte| byte == 0);
            let rank = variables.find_map(|it| {
                let own = it.strip_prefix(b"DDP_JOB=");
                let own = own.and_then(|job| job.split(|&byte| byte == b'/').next());
                own.or(it.strip_prefix(b"OMPI_COMM_WORLD_RANK="))
            })?;
            Some((std::str::from_utf8(rank).ok()?.parse().ok()?, pid))
        };
        let all = processes_of(&self.mark).into_iter();
        all.filter_map(rank_of).collect()
    }

    /// Waits until one of its processes has a thread of this name.
    #[track_caller]
    pub(crate) fn wait_for_thread(&self, name: &str) {
        let has_it = |&pid: &u32| threads_of(pid).iter().any(|thread| thread == name);
        let is_there = || processes_of(&self.mark).iter().any(has_it);
        self.wait_until(&format!("a thread that is called {name}"), is_there);
    }

    /// Waits until all its `ranks` listen to signals that ask to stop.
    #[track_caller]
    pub(crate) fn wait_until_it_listens(&self, ranks: usize) {
        let listen = || {
            let all = processes_of(&self.mark).into_iter();
            all.filter(|&pid| catches_usr1(pid)).count()
        };
        self.wait_until("ranks that listen", || listen() >= ranks);
    }

    /// Sends a signal to the process that was started, of ranks to their launcher, and waits until
    /// it is delivered.
    pub(crate) fn signal(&self, signal: &str) {
        self.deliver(signal, self.pid);
    }

    /// Whether the process that was started ignores a signal.
    pub(crate) fn ignores(&self, signal: u32) -> bool {
        has_signal(self.pid, "SigIgn:", signal)
    }

    /// Sends a signal to all its processes.
    pub(crate) fn signal_all(&self, signal: &str) {
        send(signal, &processes_of(&self.mark));
    }

    /// How the process ended that was started; none while it runs.
    fn status(&self) -> Option<ExitStatus> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        child.try_wait().expect("it is a child of this process")
    }

    /// Whether it is not over.
    pub(crate) fn goes_on(&mut self) -> bool {
        self.status().is_none()
    }

    /// Ends the process that was started, not those that it started.
    pub(crate) fn kill(&mut self) {
        kill(&[self.pid]);
    }

    /// Kills what is left of it. How it ended, and what it has printed.
    fn end(&self) -> Ended {
        let is_read = || self.said.iter().all(|said| said.reader.is_finished());
        let status = loop {
            let left = processes_of(&self.mark);
            match self.status().filter(|_| left.is_empty() && is_read()) {
                Some(status) => break status,
                None => kill(&left),
            }
            look_again_soon();
        };
        let [stdout, stderr] = self.said.each_ref().map(Said::text);
        Ended {
            status,
            stdout,
            stderr,
        }
    }

    #[track_caller]
    pub(crate) fn wait(mut self) -> Ended {
        let started = Instant::now();
        let (mut in_time, mut stayed) = (true, String::new());
        let mut last_free = started;
        while self.goes_on() {
            if !(self.turn.is_some() && waits_for_a_lock(self.pid)) {
                last_free = Instant::now();
            } else if last_free.elapsed() > LOCKED_MAX && processes_of(&self.mark) == [self.pid] {
                println!("mpirun waits for its own lock, and its ranks are gone: ending it");
                kill(&[self.pid]);
            }
            if started.elapsed() > RUN_MAX && in_time {
                in_time = false;
                let left = processes_of(&self.mark).into_iter().map(described);
                stayed = left.collect::<Vec<_>>().join("\n");
                kill(&processes_of(&self.mark));
            }
            look_again_soon();
        }
        let left = left_behind(&self.mark);
        let ended = self.end();
        self.is_over = true;
        assert!(in_time, "not over after {RUN_MAX:?}: {ended}\n{stayed}");
        assert!(left.is_empty(), "processes {left:?} are left: {ended}");
        let shared = left_in_shared_memory(&self.shared_before);
        assert!(shared.is_empty(), "left in /dev/shm: {shared:?}: {ended}");
        ended
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.is_over {
            self.end();
        }
    }
}

/// `mpirun` that survives a write to a rank that has just ended. Open MPI ignores SIGPIPE, but not
/// from its first moment to its last.
#[cfg(feature = "mpi")]
fn mpirun() -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", r#"trap '' PIPE; exec mpirun "$@""#, "mpirun"]);
    command
}

/// Jobs under `mpirun` that run at a time. More than one, because a job that has failed mostly
/// waits: `mpirun` takes a second to reap its ranks. Few enough for two cores.
const TURNS: usize = 3;
static TAKEN: Mutex<usize> = Mutex::new(0);
static GIVEN_BACK: Condvar = Condvar::new();

struct Turn;

impl Turn {
    fn wait_for() -> Turn {
        let taken = TAKEN.lock().expect("nothing panics under this lock");
        *GIVEN_BACK
            .wait_while(taken, |taken| *taken == TURNS)
            .expect("nothing panics under this lock") += 1;
        Turn
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *TAKEN.lock().expect("nothing panics under this lock") -= 1;
        GIVEN_BACK.notify_one();
    }
}

/// The command, which hears all signals. Processes that a script starts in the background ignore
/// Ctrl-C, under nohup a closed terminal, and children inherit that.
fn hearing_all_signals(command: Command) -> Command {
    let mut hearing = Command::new("/usr/bin/env");
    hearing
        .arg("--default-signal")
        .arg(command.get_program())
        .args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => hearing.env(name, value),
            None => hearing.env_remove(name),
        };
    }
    hearing
}

impl Ended {
    /// As the program, or `mpirun`, gave it; none if a signal ended it.
    pub(crate) fn exit_code(&self) -> Option<i32> {
        self.status.code()
    }

    /// The signal that ended it.
    pub(crate) fn signal(&self) -> Option<i32> {
        self.status.signal()
    }

    /// The lines in which the job says why it ended.
    pub(crate) fn causes(&self) -> Vec<&str> {
        self.stderr
            .lines()
            .filter(|line| line.starts_with("ddp-train:"))
            .collect()
    }

    /// It did what it should.
    #[track_caller]
    pub(crate) fn assert_well(&self) {
        assert_eq!(self.exit_code(), Some(0), "{self}");
        assert!(self.causes().is_empty(), "{self}");
    }

    /// It ended with this code and said why in one line. That line.
    #[track_caller]
    pub(crate) fn assert_fails(&self, exit_code: i32) -> &str {
        assert_eq!(self.exit_code(), Some(exit_code), "{self}");
        assert_eq!(self.stdout, "", "{self}");
        let [cause] = self.causes()[..] else {
            panic!("one line says why: {self}")
        };
        cause
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}\n{}\n{}",
            self.status,
            self.stdout.trim(),
            self.stderr.trim()
        )
    }
}

/// Checks all cases at the same time.
pub(crate) fn all_at_once<C: Send>(cases: impl IntoIterator<Item = C>, check: impl Fn(C) + Sync) {
    let check = &check;
    std::thread::scope(|scope| {
        for case in cases {
            scope.spawn(move || check(case));
        }
    });
}

/// A port that is free, and not one of those that the system gives to whoever asks for any.
pub(crate) fn free_port() -> u16 {
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    let first = std::process::id() as usize * 64;
    let ports = std::iter::repeat_with(|| first + ASKED.fetch_add(1, Ordering::Relaxed));
    let mut ports = ports.map(|number| 10_000 + (number % 20_000) as u16);
    let is_free = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    ports.find(is_free).expect("a port is free")
}

/// What the name of a host is.
pub(crate) fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .expect("this is Linux")
        .trim()
        .to_string()
}

/// Kills random ranks at random times, up to `most` apart, until the job is over, but only so
/// often that no rank is given up: that is after ten ends in a row. How often.
pub(crate) fn kill_ranks(running: &mut Running, seed: u64, most: Duration) -> u64 {
    const KILLS_MAX: u64 = 8;
    let mut kills = 0;
    while running.goes_on() && kills < KILLS_MAX {
        at_random(seed, 2 * kills, most);
        let ranks = running.ranks();
        if !ranks.is_empty() {
            let (rank, _) = ranks[mixed(seed, 2 * kills + 1) as usize % ranks.len()];
            running.signal_rank(rank, "KILL");
            kills += 1;
        }
    }
    kills
}
