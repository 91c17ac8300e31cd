//! Another host, as the launcher sees it: an agent that starts ranks there, at the other end of an
//! ssh session or of a connection that the agent made.

use std::io::{BufRead, BufReader, Read, Write, stdout};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use ddp_kernels::panics;

use super::agent::{AgentOrder, Greeting, News, SSH_CONNECTION, Setup};
use super::listener::Agent;
use super::signals::Signals;
use super::task::{RankCommand, VERSION};
use crate::error::{Error, Problem, Result};
use crate::say::print_line;

/// The variable with another command than `ssh`, such as `ssh -p 2222` or `srun -N 1 -n 1 -w`.
const SSH: &str = "DDP_SSH";
/// No question is asked. A host that is silent for a minute is lost.
const SSH_OPTIONS: [&str; 8] = [
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=10",
    "-o",
    "ServerAliveInterval=15",
    "-o",
    "ServerAliveCountMax=4",
];
/// How long the last words of ssh may take once it has ended.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// The most bytes of a line of an agent, which may be what a rank has printed.
const LINE_MAX: u64 = 16 << 20;
/// Exit codes: of ssh if it cannot connect, of shells for a program that they do not find.
const UNREACHABLE: i32 = 255;
const NOT_FOUND: [i32; 2] = [126, 127];

/// A host on which an agent starts ranks.
pub(super) struct Remote {
    pub(super) name: String,
    /// None if its agent comes by itself.
    ssh: Option<Child>,
    /// What a thread writes to it: a host that has stalled must not stall this process.
    orders: Option<Sender<String>>,
    /// Its news have this number.
    pub(super) number: usize,
    /// Where hosts reach it and the launcher, if that is known without its agent.
    reached: Option<[String; 2]>,
    /// The threads that read what it says.
    readers: Vec<JoinHandle<()>>,
    words: Arc<Words>,
    /// What the agent said first; None until then.
    pub(super) answer: Option<Result<Greeting>>,
}

/// What the host writes to standard error: shown, but for what ssh says before the agent answers.
#[derive(Default)]
struct Words {
    are_shown: AtomicBool,
    kept: Mutex<String>,
}

impl Remote {
    /// A host whose agent has not come yet.
    pub(super) fn absent(name: String, number: usize) -> Remote {
        Remote {
            name,
            ssh: None,
            orders: None,
            number,
            reached: None,
            readers: Vec::new(),
            words: Arc::default(),
            answer: None,
        }
    }

    /// The host of an agent that has come to `launcher`.
    pub(super) fn of_agent(
        agent: Agent,
        number: usize,
        launcher: String,
        setup: Setup,
        sender: Sender<(usize, News)>,
    ) -> Result<Remote> {
        let address = agent.address.to_string();
        let mut remote = Remote::absent(address.clone(), number);
        let socket = agent.orders.0.try_clone();
        let socket = socket.map_err(|error| Error::setup(remote.action(), error, "see dmesg"))?;
        // A thread reads the same socket.
        let end = move || _ = TcpStream::from(OwnedFd::from(socket)).shutdown(Shutdown::Write);
        remote.write_to(agent.orders, end)?;
        remote.reached = Some([address, launcher]);
        let (news, words) = (agent.news, Arc::clone(&remote.words));
        remote.read(move || listen(news, number, &sender, &words))?;
        remote.send(&AgentOrder::Prepare(setup));
        Ok(remote)
    }

    /// Connects to `host` by ssh. Its news go to `sender`, with this `number`.
    pub(super) fn connect(
        host: &str,
        number: usize,
        task: &RankCommand,
        setup: Setup,
        sender: Sender<(usize, News)>,
    ) -> Result<Remote> {
        let mut command = ssh(host, task)?;
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // Ctrl-C does not reach it. Signals to all processes of a job, which schedulers send, stay
        // blocked: the ranks need the connection to end well.
        let ssh = command.process_group(0).spawn();
        let mut ssh = ssh.map_err(|error| {
            let program = command.get_program().display();
            let help = format!("install an ssh client, or set {SSH} to one");
            Error::setup(format!("start {program}"), error, help)
        })?;
        let (output, errors) = (ssh.stdout.take(), ssh.stderr.take());
        let mut remote = Remote::absent(host.into(), number);
        let orders = ssh.stdin.take();
        remote.ssh = Some(ssh);
        if let Some(orders) = orders {
            remote.write_to(orders, || ())?;
        }
        if let (Some(output), Some(errors)) = (output, errors) {
            let [words, shown] = [(); 2].map(|()| Arc::clone(&remote.words));
            remote.read(move || listen(output, number, &sender, &words))?;
            remote.read(move || show(errors, &shown))?;
        }
        remote.send(&AgentOrder::Prepare(setup));
        Ok(remote)
    }

    fn read(&mut self, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = Builder::new().name("host".into()).spawn(body);
        self.readers
            .push(thread.map_err(|error| Error::no_thread("host", &error))?);
        Ok(())
    }

    /// Sends orders to `host`, and calls `end` after the last one.
    fn write_to(
        &mut self,
        mut host: impl Write + Send + 'static,
        end: impl FnOnce() + Send + 'static,
    ) -> Result<()> {
        let (orders, queue) = mpsc::channel::<String>();
        let write = move || {
            let mut orders = queue.iter();
            _ = orders.try_for_each(|order| host.write_all(order.as_bytes()));
            end();
        };
        let thread = Builder::new().name("orders".into()).spawn(write);
        thread.map_err(|error| Error::no_thread("orders", &error))?;
        self.orders = Some(orders);
        Ok(())
    }

    /// If the connection is lost, its news say so.
    pub(super) fn send(&mut self, order: &AgentOrder) {
        if let Some(orders) = &self.orders {
            let text = serde_json::to_string(order).expect("orders are JSON");
            _ = orders.send(text + "\n");
        }
    }

    /// The agent has answered.
    pub(super) fn is_ready(&mut self, mut greeting: Greeting) {
        if let Some([own, launcher]) = self.reached.clone() {
            (greeting.own, greeting.launcher) = (Some(own), Some(launcher));
        }
        self.answer = Some(Ok(greeting));
    }

    pub(super) fn greeting(&self) -> Greeting {
        let answer = self.answer.as_ref().and_then(|answer| answer.as_ref().ok());
        answer.cloned().unwrap_or_default()
    }

    /// Where other hosts reach it: at the address that ssh connected to, if it is known, because
    /// names may mean something here only.
    pub(super) fn address(&self) -> String {
        let name = self.name.rsplit('@').next().unwrap_or_default();
        self.greeting().own.unwrap_or_else(|| name.into())
    }

    fn action(&self) -> String {
        format!("start ranks on {}", self.name)
    }

    /// Why the agent did not answer, once ssh has ended.
    pub(super) fn why_no_answer(&mut self, task: &RankCommand) -> Error {
        let status = self.ssh.as_mut().map(Child::wait).and_then(Result::ok);
        let program = task.program.display();
        std::thread::sleep(LAST_WORDS);
        let kept = panics::lock(&self.words.kept);
        let said = kept.lines().rfind(|line| !line.trim().is_empty());
        let said = said.map_or("no reason given", str::trim);
        let same = format!("every host needs version {VERSION} of it at this path");
        match status.and_then(|status| status.code()) {
            Some(code) if NOT_FOUND.contains(&code) => {
                let reason = format!("cannot run {program} there: {said}");
                Error::Launch(Problem::new(self.action(), reason, same))
            }
            Some(code) if code != UNREACHABLE => {
                let reason = format!("{program} ended there with {code}: {said}");
                Error::Launch(Problem::new(self.action(), reason, same))
            }
            _ => {
                let help = format!(
                    "`ssh {}` must work without a question: check its name, its keys and known_hosts",
                    self.name
                );
                Error::setup(self.action(), format!("ssh cannot reach it: {said}"), help)
            }
        }
    }

    /// The error of a host that has not answered within `limit`.
    pub(super) fn silent(&self, limit: Duration) -> Error {
        let reason = format!("it did not answer within {} s", limit.as_secs());
        Error::setup(self.action(), reason, "check that host and its network")
    }

    /// Lets the agent end, and ssh with it.
    pub(super) fn leave(&mut self) {
        self.orders = None;
    }

    /// Whether ssh has ended, and all that it said is read.
    pub(super) fn has_left(&mut self) -> bool {
        let mut ssh = self.ssh.iter_mut();
        ssh.all(|ssh| !matches!(ssh.try_wait(), Ok(None)))
            && self.readers.iter().all(JoinHandle::is_finished)
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        if let Some(ssh) = &mut self.ssh {
            _ = ssh.kill();
            _ = ssh.wait();
        }
    }
}

/// The command that starts an agent on `host`.
fn ssh(host: &str, task: &RankCommand) -> Result<Command> {
    let text = std::env::var(SSH).unwrap_or_else(|_| "ssh".into());
    let mut words = text.split_whitespace();
    let program = words.next().unwrap_or("ssh");
    let mut command = Command::new(program);
    command.args(words);
    if program.rsplit('/').next() == Some("ssh") {
        command.args(SSH_OPTIONS).arg("-T");
    }
    command.arg(host);
    // Without it the agent may not find MPI's library, and not start.
    if let Ok(libraries) = std::env::var("LD_LIBRARY_PATH") {
        let libraries = quoted(&libraries);
        command.args(["env", &format!("LD_LIBRARY_PATH={libraries}")]);
    }
    let program = text_of(task.program.as_os_str())?;
    command.args([&quoted(&program), task.agent]);
    // That of this process would tell the agent wrong addresses, if not ssh starts it.
    command.env_remove(SSH_CONNECTION);
    Ok(command)
}

/// In single quotes, where a shell needs them: not every command that starts agents uses one.
fn quoted(text: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "/._-+:,@%".contains(letter);
    if text.chars().all(is_plain) {
        text.into()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// Text that goes to other hosts.
pub(super) fn text_of(text: &std::ffi::OsStr) -> Result<String> {
    let valid = text.to_str().map(str::to_string);
    valid.ok_or_else(|| {
        let reason = format!("expected UTF-8, got {}", text.display());
        let help = "use other characters, or start ranks on this machine only";
        Error::Launch(Problem::new(
            "pass its arguments to other hosts",
            reason,
            help,
        ))
    })
}

/// Reads the agent's news, and skips what a login shell prints.
fn listen(output: impl Read, number: usize, sender: &Sender<(usize, News)>, words: &Words) {
    for line in lines(output) {
        match serde_json::from_str(&line) {
            Err(_) => continue,
            Ok(News::Printed(line)) => {
                // Whoever read this may be gone.
                _ = writeln!(stdout().lock(), "{line}");
                continue;
            }
            Ok(news) => {
                words.are_shown.store(true, Ordering::Relaxed);
                _ = sender.send((number, news));
            }
        }
        Signals::wake();
    }
    _ = sender.send((number, News::Gone));
    Signals::wake();
}

/// The lines of an agent, until it closes or a line is too long.
fn lines(output: impl Read) -> impl Iterator<Item = String> {
    let mut output = BufReader::new(output);
    std::iter::from_fn(move || {
        let mut line = String::new();
        let read = (&mut output).take(LINE_MAX).read_line(&mut line);
        (read.is_ok() && line.ends_with('\n')).then_some(line)
    })
}

fn show(errors: ChildStderr, words: &Words) {
    for line in BufReader::new(errors).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line).into_owned() + "\n";
        if words.are_shown.load(Ordering::Relaxed) {
            print_line(&line)
        } else {
            *panics::lock(&words.kept) += &line
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::spawn::agent::RankVariables;

    #[test]
    fn a_host_that_reads_nothing_does_not_stall_the_launcher() {
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut host = Remote::absent("far".into(), 0);
        host.write_to(ours, || ()).unwrap();
        let variables = RankVariables {
            host_addresses: Some("x".repeat(1 << 20)),
            ..RankVariables::default()
        };
        (0..8).for_each(|rank| host.send(&AgentOrder::Start(rank, 1, variables.clone())));
        assert!(host.orders.is_some());
        host.leave();
        let mut read = String::new();
        theirs.read_to_string(&mut read).unwrap();
        assert_eq!(read.lines().count(), 8);
    }

    #[test]
    fn a_line_that_does_not_end_is_the_last() {
        let endless = std::io::repeat(b'x').take(3 * LINE_MAX);
        let all: Vec<String> = lines(b"one\ntwo\n".chain(endless)).collect();
        assert_eq!(all, ["one\n", "two\n"]);
    }

    #[test]
    fn text_is_quoted_for_shells() {
        assert_eq!(quoted("/opt/ddp-0.7/ddp-train"), "/opt/ddp-0.7/ddp-train");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's $x"), r"'it'\''s $x'");
    }
}
