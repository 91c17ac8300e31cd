//! Starts ranks under the real `mpirun`, and collects what they did. All processes of a job have
//! its folder in their environment: that identifies them, whoever their parent is.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::rank::{END, FOLDER, ROLE, TIMEOUT_MS, now_ms};

/// The end of patience with a job after its fault. Ranks that nothing ends go on for ten minutes.
pub(crate) const END_MAX_MS: u64 = 60_000;
/// A timeout that is to expire. Healthy ranks show progress in less, also on a busy machine.
pub(crate) const EXPIRES_MS: u64 = 20_000;
/// Longer than any job takes, also where NCCL takes its 60 s to join ranks. A job that
/// hangs is ended, and its test fails.
const RUN_MAX: Duration = Duration::from_secs(300);

/// Instead of a host's name: processes that end, or do nothing, before they start MPI; and one that
/// stops in it.
pub(crate) const LEAVES: &str = "leaves";
/// Instead of a host's name: ranks that start MPI after the one that leaves is gone and its
/// launcher has noticed. Otherwise Open MPI's launcher would end the job itself.
pub(crate) const FOLLOWS: &str = "follows";
pub(crate) const SLEEPS: &str = "sleeps";
pub(crate) const STARTS_ONLY: &str = "starts MPI only";
/// Instead of a host's name: `under_another_launcher`.
const ANOTHER_LAUNCHER: &str = "another launcher";

/// Ranks to start.
pub(crate) struct Job {
    command: Command,
}

/// A job that runs. Dropped before it has ended, it is killed, with all that it started.
pub(crate) struct Running {
    mpirun: Child,
    /// None when nothing of the job is left.
    stderr: Option<JoinHandle<String>>,
    folder: PathBuf,
}

/// A job that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// `mpirun`'s exit code; None if a signal ended it before it printed one.
    pub(crate) exit_code: Option<i32>,
    /// What the ranks wrote.
    told: String,
    pub(crate) stderr: String,
    ended_at_ms: u64,
}

impl Job {
    /// `size` ranks that play `role`.
    pub(crate) fn new(size: usize, role: &str) -> Job {
        Job::on_hosts(&[("", size)], role)
    }

    /// The same, under a launcher that is not known to end all ranks when one has failed.
    pub(crate) fn under_another_launcher(size: usize, role: &str) -> Job {
        Job::on_hosts(&[(ANOTHER_LAUNCHER, size)], role)
    }

    /// Ranks that play `role` on several hosts that this machine stands in for.
    pub(crate) fn on_hosts(hosts: &[(&str, usize)], role: &str) -> Job {
        let mut command = Command::new("mpirun");
        // SAFETY: geteuid takes nothing, touches nothing and cannot fail.
        if unsafe { libc::geteuid() } == 0 {
            command.arg("--allow-run-as-root");
        }
        command.args(["--oversubscribe", "--bind-to", "none"]);
        let program = std::env::current_exe().expect("this program has a path");
        // Holds the number of the process that leaves, in the job's own folder.
        let leaver = format!("\"${FOLDER}/leaver\"");
        for (index, (host, size)) in hosts.iter().enumerate() {
            if index > 0 {
                command.arg(":");
            }
            command.args(["-n", &size.to_string()]);
            match *host {
                "" => {}
                LEAVES => {
                    command.args(["sh", "-c", &format!("echo $$ > {leaver}")]);
                    continue;
                }
                // A process exists until its launcher has noticed its end.
                FOLLOWS => {
                    let is_gone = format!("[ -s {leaver} ] && ! kill -0 $(cat {leaver}) 2>&-");
                    let wait = format!("until {is_gone}; do sleep 0.02; done; exec \"$0\"");
                    command.args(["sh", "-c", &wait]);
                }
                SLEEPS => {
                    command.args(["sleep", "60"]);
                    continue;
                }
                // With the settings of the other ranks, or MPI would not start.
                STARTS_ONLY => {
                    let settings = ["OMPI_MCA_pml=ob1", "OMPI_MCA_btl=^tcp,ofi,openib,usnic,uct"];
                    command
                        .args(["env", &format!("{ROLE}=init only")])
                        .args(settings);
                }
                // The remaining variables are PMIx's, as with srun.
                ANOTHER_LAUNCHER => _ = command.args(["env", "-u", "OMPI_COMM_WORLD_RANK"]),
                host => _ = command.args(["-x", &format!("DDP_TEST_HOST={host}")]),
            }
            command.arg(&program);
        }
        // Variables of this test's own launcher must not reach its ranks.
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SLURM_")) {
            command.env_remove(name);
        }
        command.env(ROLE, role).env_remove("RUST_BACKTRACE");
        Job { command }
    }

    pub(crate) fn timeout_ms(mut self, timeout_ms: u64) -> Job {
        self.command.env(TIMEOUT_MS, timeout_ms.to_string());
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Job {
        self.command.env(name, value);
        self
    }

    /// Without a variable that these tests may have been started with.
    pub(crate) fn without(mut self, name: &str) -> Job {
        self.command.env_remove(name);
        self
    }

    pub(crate) fn start(mut self) -> Running {
        static JOBS: AtomicUsize = AtomicUsize::new(0);
        let number = JOBS.fetch_add(1, Ordering::Relaxed);
        let folder =
            // Of one width, so that no path is the beginning of another.
            std::env::temp_dir().join(format!("ddp-mpirun-test-{}-{number:04}", std::process::id()));
        std::fs::create_dir(&folder).expect("the temporary folder can be written");
        self.command.env(FOLDER, &folder);
        hear_all_signals(&mut self.command);
        let piped = self
            .command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut mpirun = piped.spawn().unwrap_or_else(|error| {
            panic!("cannot start mpirun: {error}. These tests need it while the feature mpi is on: launch/setup installs it.")
        });
        let stderr = Some(reader(mpirun.stderr.take()));
        Running {
            mpirun,
            stderr,
            folder,
        }
    }

    pub(crate) fn run(self) -> Ended {
        self.start().wait()
    }
}

/// Runs jobs at the same time: for those that wait.
pub(crate) fn all_at_once<const N: usize>(jobs: [Job; N]) -> [Ended; N] {
    jobs.map(Job::start).map(Running::wait)
}

/// Processes that a script starts in the background ignore Ctrl-C, under nohup a closed terminal,
/// and children inherit that.
fn hear_all_signals(command: &mut Command) {
    let reset = || {
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
            // SAFETY: the default action runs no code of this process.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: it only calls signal, which may be called between fork and exec.
    unsafe { command.pre_exec(reset) };
}

fn reader(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        _ = pipe.expect("it is a pipe").read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn read_all(folder: &Path) -> String {
    let files = std::fs::read_dir(folder).expect("it is there").flatten();
    files
        .filter_map(|file| std::fs::read_to_string(file.path()).ok())
        .collect()
}

/// The processes that have this folder in their environment. Zombies have no environment.
fn processes_of(folder: &Path) -> Vec<libc::pid_t> {
    let mark = folder.to_str().expect("its name is text");
    let is_ours = |pid: &libc::pid_t| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        String::from_utf8_lossy(&environment).contains(mark)
    };
    let names = std::fs::read_dir("/proc").expect("/proc can be read");
    let pids = names
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(is_ours).collect()
}

fn kill(pids: &[libc::pid_t]) {
    for &pid in pids {
        // SAFETY: sends a signal to a process of a job of these tests.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
}

fn look_again_soon() {
    // Sleep: what is waited for is looked at.
    std::thread::sleep(Duration::from_millis(20));
}

impl Running {
    /// Waits until `count` ranks have written something by this name. Fails with the job's output
    /// if the job ends before that.
    pub(crate) fn wait_until_told(&mut self, name: &str, count: usize) {
        let (started, told) = (Instant::now(), format!("\n{name}: "));
        loop {
            // In this order: what ranks have written when the job ends counts.
            let status = self.status();
            let text = format!("\n{}", read_all(&self.folder));
            if text.matches(&told).count() >= count {
                return;
            }
            if status.is_some() || started.elapsed() > RUN_MAX {
                let ended = self.end(now_ms());
                panic!("waited for {name} until the job had ended, or for {RUN_MAX:?}: {ended}");
            }
            look_again_soon();
        }
    }

    /// How the launcher ended; None while it runs.
    fn status(&mut self) -> Option<ExitStatus> {
        let status = self.mpirun.try_wait();
        status.expect("mpirun is a child of this process")
    }

    /// Kills the launcher, as a lack of memory would.
    pub(crate) fn kill_launcher(&mut self) {
        self.mpirun.kill().expect("mpirun is there");
    }

    /// Stops the ranks one after the other, 100 ms apart, and resumes them in reverse order after
    /// `pause`: the last to stop waits for the first.
    pub(crate) fn suspend(&self, pause: Duration) {
        let told = read_all(&self.folder);
        let pids = told
            .lines()
            .filter_map(|line| line.strip_prefix("pid: "))
            .map(|pid| pid.parse().expect("a number"));
        let pids: Vec<libc::pid_t> = pids.collect();
        let signal = |pid: libc::pid_t, signal: i32| {
            // SAFETY: sends a signal to a process of this job, which has not ended.
            unsafe { libc::kill(pid, signal) };
            // Sleep: a rank that runs may come to wait for one that does not.
            std::thread::sleep(Duration::from_millis(100));
        };
        pids.iter().for_each(|&pid| signal(pid, libc::SIGSTOP));
        // Sleep: ranks are to continue, whatever time it takes.
        std::thread::sleep(pause);
        pids.iter()
            .rev()
            .for_each(|&pid| signal(pid, libc::SIGCONT));
    }

    /// Lets ranks end that make steps (`rank::steps`).
    pub(crate) fn let_end(&self) {
        std::fs::write(self.folder.join(END), "").expect("the folder has room");
    }

    /// Ends the job as a scheduler does when its time is up.
    pub(crate) fn ask_to_end(&self) {
        // SAFETY: sends a signal to a child that has not been waited for.
        unsafe { libc::kill(self.mpirun.id() as libc::pid_t, libc::SIGTERM) };
    }

    pub(crate) fn wait(mut self) -> Ended {
        let started = Instant::now();
        while self.status().is_none() && started.elapsed() < RUN_MAX {
            look_again_soon();
        }
        let (is_over, ended_at_ms) = (self.status().is_some(), now_ms());
        let mut left = processes_of(&self.folder);
        // Ranks may end after their launcher.
        while is_over && !left.is_empty() && started.elapsed() < RUN_MAX {
            look_again_soon();
            left = processes_of(&self.folder);
        }
        let ended = self.end(ended_at_ms);
        assert!(is_over, "not over after {RUN_MAX:?}: {ended}");
        assert!(left.is_empty(), "processes {left:?} are left: {ended}");
        ended
    }

    /// Kills what is left of it. How it ended.
    fn end(&mut self, ended_at_ms: u64) -> Ended {
        let status = loop {
            let left = processes_of(&self.folder);
            match self.status().filter(|_| left.is_empty()) {
                Some(status) => break status,
                None => kill(&left),
            }
            look_again_soon();
        };
        let stderr = self.stderr.take().map(JoinHandle::join);
        let stderr = stderr.and_then(Result::ok).unwrap_or_default();
        let told = read_all(&self.folder);
        _ = std::fs::remove_dir_all(&self.folder);
        Ended {
            exit_code: status.code().or_else(|| printed_code(&stderr)),
            told,
            stderr,
            ended_at_ms,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.stderr.is_some() {
            self.end(now_ms());
        }
    }
}

/// The exit code that `mpirun` printed before it crashed in its own `PMIx_server_finalize`.
/// Open MPI 4.1 sometimes does so when a rank ended the job.
fn printed_code(stderr: &str) -> Option<i32> {
    let crashed = stderr.contains("(PMIx_server_finalize+");
    let code = stderr
        .lines()
        .find_map(|line| line.trim().strip_prefix("Exit code:"))?;
    crashed.then(|| code.trim().parse().ok())?
}

impl Ended {
    /// The values that ranks wrote by this name.
    pub(crate) fn told(&self, name: &str) -> Vec<&str> {
        self.told
            .lines()
            .filter_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
            .collect()
    }

    /// The lines in which the job said why it ended.
    pub(crate) fn causes(&self) -> Vec<&str> {
        self.stderr
            .lines()
            .filter(|line| line.contains("ddp-train: "))
            .collect()
    }

    /// All ranks did what they should.
    #[track_caller]
    pub(crate) fn assert_well(&self) {
        assert_eq!(self.exit_code, Some(0), "{self}");
        self.assert_clean();
    }

    /// Nothing of this job is left in /dev/shm. That no process is left was seen when it ended.
    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        assert!(!self.told("pid").is_empty(), "{self}");
        // Open MPI 4 names jobs by numbers, and has them in the names of its files.
        let name = self.told("job")[0].trim_matches('"');
        let job: u64 = name
            .parse()
            .unwrap_or_else(|_| panic!("PMIX_NAMESPACE {name:?} is no number: {self}"));
        let job = format!("{job:x}");
        let names = std::fs::read_dir("/dev/shm")
            .expect("/dev/shm can be read")
            .flatten();
        let ours = |name: &str| name.contains(&job);
        let left: Vec<String> = names
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .filter(|name| ours(name))
            .collect();
        assert!(left.is_empty(), "left in /dev/shm: {left:?}");
    }

    /// The job ended soon after its fault, reported why in one line, and left nothing. Returns the
    /// line.
    #[track_caller]
    pub(crate) fn assert_ended_with(&self, exit_code: i32) -> &str {
        self.assert_clean();
        assert_eq!(self.exit_code, Some(exit_code), "{self}");
        if let [at_ms] = self.told("fault")[..] {
            let took_ms = self
                .ended_at_ms
                .saturating_sub(at_ms.parse().expect("a time"));
            assert!(
                took_ms <= END_MAX_MS,
                "the job took {took_ms} ms to end: {self}"
            );
        }
        assert_eq!(self.causes().len(), 1, "one line says why: {self}");
        self.causes()[0]
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "exit code {:?}\n{}\n{}",
            self.exit_code,
            self.told.trim(),
            self.stderr.trim()
        )
    }
}
