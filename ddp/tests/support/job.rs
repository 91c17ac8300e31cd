//! Starts `ddp-train` and reports how it ended.
//!
//! Every job has a mark in the environment of all its processes: that identifies them, whoever
//! their parent is. After each job no process of it may be left, and
//! nothing in /dev/shm.

use std::collections::BTreeSet;
use std::fmt;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::support::metrics_log::MetricsLog;
use crate::support::processes::*;
use crate::support::random::mixed;

/// How long a job may take to end after a fault, as this project promises.
pub(crate) const END_MAX: Duration = Duration::from_secs(5);
/// Longer than any job here takes on a busy machine: one that hangs is ended, and its test fails.
const RUN_MAX: Duration = Duration::from_secs(120);
/// How long a launcher whose ranks are gone may wait for its lock.
const LOCKED_MAX: Duration = Duration::from_secs(5);

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
        self.job(hearing_ctrl_c(), words, false)
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
        self.job(hearing_ctrl_c(), &format!("{words} --ranks {count}"), true)
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
        let job = self.job(hearing_ctrl_c(), &format!("{words} {hosts}"), true);
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
        let mut command = Command::new("mpirun");
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
        let mut command = Command::new("mpirun");
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
        let text = format!("#!/bin/sh\n{text}\n");
        std::fs::write(&path, text).expect("the temporary folder can be written");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&path, mode).expect("it is ours");
        path
    }

    #[cfg(feature = "mpi")]
    fn under_mpirun(&self, options: &str, parts: &[(String, &str)]) -> Job {
        let mut command = Command::new("mpirun");
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
        command.args(self.words(words)).current_dir(&self.0);
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

/// A job that runs.
pub(crate) struct Running {
    child: Child,
    said: [JoinHandle<String>; 2],
    folder: PathBuf,
    /// What the environment of its processes has.
    mark: String,
    shared_before: BTreeSet<String>,
    after_step_2: Option<Instant>,
    _turn: Option<Turn>,
    _sessions: Folder,
}

/// A job that has ended.
pub(crate) struct Ended {
    status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// The time from step 2, once it is in the metrics log, until all processes were gone; a fault
    /// in step 3 came later.
    pub(crate) after_step_2: Option<Duration>,
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
        let mut child = piped.spawn().unwrap_or_else(|error| {
            let name = self.command.get_program().display();
            panic!(
                "cannot start {name}: {error}. These tests need mpirun while the feature mpi is on"
            )
        });
        let said = [reader(child.stdout.take()), reader(child.stderr.take())];
        Running {
            child,
            said,
            folder: self.folder,
            mark,
            shared_before,
            after_step_2: None,
            _turn: turn,
            _sessions: sessions,
        }
    }

    /// Starts it, and waits for its end.
    #[track_caller]
    pub(crate) fn run(self) -> Ended {
        self.start().wait()
    }
}

fn reader(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        _ = pipe.expect("it is a pipe").read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

impl Running {
    /// Whether step 2 is in the metrics log.
    fn has_taken_step_2(&self) -> bool {
        let log =
            std::fs::read_to_string(self.folder.join("out/metrics.jsonl")).unwrap_or_default();
        log.contains(r#"{"event":"step","step":2,"#)
    }

    fn look_for_step_2(&mut self) {
        if self.after_step_2.is_none() && self.has_taken_step_2() {
            self.after_step_2 = Some(Instant::now());
        }
    }

    pub(crate) fn wait_for_step_2(&self) {
        let started = Instant::now();
        while !self.has_taken_step_2() {
            assert!(started.elapsed() < RUN_MAX, "step 2 does not come");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until there is a line in the metrics log that has `part`, or the job is over.
    pub(crate) fn wait_for(&mut self, part: &str) {
        let started = Instant::now();
        let has = |folder: &Path| {
            std::fs::read_to_string(folder.join("out/metrics.jsonl"))
                .unwrap_or_default()
                .contains(part)
        };
        while !has(&self.folder)
            && self
                .child
                .try_wait()
                .expect("it is a child of this process")
                .is_none()
        {
            assert!(started.elapsed() < RUN_MAX, "{part} does not come");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends a signal such as `TERM` to a rank and waits until it is delivered; without a launcher,
    /// to the process itself. Does nothing if the process has ended.
    pub(crate) fn signal_rank(&self, rank: usize, signal: &str) {
        let pid = match self._turn {
            Some(_) => self.ranks().into_iter().find(|(known, _)| *known == rank),
            None => Some((0, self.child.id())),
        };
        if let Some((_, pid)) = pid {
            send(signal, &[pid]);
            // Signals that wait together come in any order: the kernel lets the last one in first.
            let started = Instant::now();
            while has_pending_signals(pid) && started.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
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
    pub(crate) fn wait_for_thread(&self, name: &str) {
        let started = Instant::now();
        let has_it = |&pid: &u32| threads_of(pid).iter().any(|thread| thread == name);
        while !processes_of(&self.mark).iter().any(has_it) {
            assert!(started.elapsed() < RUN_MAX, "no thread is called {name}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until all its `ranks` listen to signals that ask to stop.
    pub(crate) fn wait_until_it_listens(&self, ranks: usize) {
        let started = Instant::now();
        while processes_of(&self.mark)
            .into_iter()
            .filter(|&pid| catches_usr1(pid))
            .count()
            < ranks
        {
            assert!(started.elapsed() < RUN_MAX, "{ranks} ranks do not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends a signal to the process that was started: of ranks to their launcher.
    pub(crate) fn signal(&self, signal: &str) {
        send(signal, &[self.child.id()]);
    }

    /// Sends a signal to all its processes.
    pub(crate) fn signal_all(&self, signal: &str) {
        send(signal, &processes_of(&self.mark));
    }

    /// Whether it is not over.
    pub(crate) fn goes_on(&mut self) -> bool {
        self.child
            .try_wait()
            .expect("it is a child of this process")
            .is_none()
    }

    /// Ends the process that was started, not those that it started.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it is a child of this process");
    }

    #[track_caller]
    pub(crate) fn wait(mut self) -> Ended {
        let started = Instant::now();
        let (mut in_time, mut stayed) = (true, String::new());
        let mut last_free = started;
        let status = loop {
            if let Some(status) = self
                .child
                .try_wait()
                .expect("it is a child of this process")
            {
                break status;
            }
            self.look_for_step_2();
            if !(self._turn.is_some() && waits_for_a_lock(self.child.id())) {
                last_free = Instant::now();
            } else if last_free.elapsed() > LOCKED_MAX
                && processes_of(&self.mark) == [self.child.id()]
            {
                println!("mpirun waits for its own lock, and its ranks are gone: ending it");
                kill(&[self.child.id()]);
            }
            if started.elapsed() > RUN_MAX && in_time {
                in_time = false;
                stayed = processes_of(&self.mark)
                    .into_iter()
                    .map(described)
                    .collect::<Vec<_>>()
                    .join("\n");
                kill(&processes_of(&self.mark));
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        self.look_for_step_2();
        let left = left_behind(&self.mark, END_MAX);
        let after_step_2 = self.after_step_2.map(|at| at.elapsed());
        // Else they would hold the pipes open.
        kill(&left);
        let [stdout, stderr] = self
            .said
            .map(|said| said.join().expect("the reader does not panic"));
        let ended = Ended {
            status,
            stdout,
            stderr,
            after_step_2,
        };
        assert!(in_time, "not over after {RUN_MAX:?}: {ended}\n{stayed}");
        assert!(left.is_empty(), "processes {left:?} are left: {ended}");
        let shared = left_in_shared_memory(&self.shared_before);
        assert!(shared.is_empty(), "left in /dev/shm: {shared:?}: {ended}");
        ended
    }
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

/// The program, which hears Ctrl-C and a closed terminal. Processes that a script starts in the
/// background ignore the one, under nohup the other, and their children inherit that. Under a
/// launcher ranks always receive both.
fn hearing_ctrl_c() -> Command {
    const SIGNALS: [(u32, &str); 3] = [(1, "HUP"), (2, "INT"), (3, "QUIT")];
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    let is_ignored = |number: u32| ignored.is_some_and(|set| set & (1 << (number - 1)) != 0);
    if !SIGNALS.iter().any(|&(number, _)| is_ignored(number)) {
        return Command::new(program());
    }
    let mut command = Command::new("env");
    let options = SIGNALS.map(|(_, name)| format!("--default-signal={name}"));
    command.args(options).arg(program());
    command
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

/// What the name of a host is.
pub(crate) fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .expect("this is Linux")
        .trim()
        .to_string()
}

/// Kills random ranks at random times, up to `most` apart, until the job is over. How many.
pub(crate) fn kill_ranks(running: &mut Running, seed: u64, most: Duration) -> u64 {
    let mut kills = 0;
    while running.goes_on() {
        std::thread::sleep(most.mul_f64(mixed(seed, 2 * kills) as f64 / u64::MAX as f64));
        let ranks = running.ranks();
        if !ranks.is_empty() {
            let (rank, _) = ranks[mixed(seed, 2 * kills + 1) as usize % ranks.len()];
            running.signal_rank(rank, "KILL");
            kills += 1;
        }
    }
    kills
}
