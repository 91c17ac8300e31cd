//! The folder of a test: what is in it, and the jobs that run there.

use super::*;

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

    /// Ranks that the program itself starts, or `mpirun` where DDP_TEST_LAUNCHER says so.
    pub(crate) fn ranks(&self, count: usize, words: &str) -> Job {
        #[cfg(feature = "mpi")]
        if std::env::var("DDP_TEST_LAUNCHER").as_deref() == Ok("mpirun") {
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
    /// machine, perhaps with a user: instead of ssh a script runs that begins with `script`.
    pub(crate) fn started_on(&self, hosts: &str, script: &str, words: &str) -> Job {
        let ssh = self.script(
            "ssh.sh",
            &format!(
                "host=$1; shift\n{script}\n\
                 export SSH_CONNECTION='127.0.0.1 1 127.0.0.1 2' DDP_TEST_HOST=${{host#*@}}\nexec sh -c \"$*\""
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
        ddp_testing::write_executable(&path, format!("#!/bin/sh\n{text}\n").as_bytes());
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
