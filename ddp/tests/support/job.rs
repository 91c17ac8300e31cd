//! Starts `ddp-train` and reports how it ended.
//!
//! Every job has a mark in the environment of all its processes: that identifies them, whoever
//! their parent is. After each job none of its processes may be left, and nothing in /dev/shm.
//! Waits here check for what they wait for, and fail with the job's output if the job ends before,
//! or after a long time limit.

mod ended;
mod folder;
mod turn;

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(crate) use self::ended::Ended;
pub(crate) use self::folder::Folder;
use self::turn::Turn;
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
