//! A process on another host that starts ranks there for a launcher. The launcher's orders arrive
//! on its standard input or on a socket, one line of JSON each; it reports about its ranks on its
//! standard output.

use std::ffi::c_int;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write, stdin, stdout};
use std::os::unix::process::ExitStatusExt;
use std::process::{ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ddp_kernels::panics;
use serde::{Deserialize, Serialize};

use super::children::{Children, RankNews, cannot_start};
use super::lease::{AgentLease, give_up};
use super::signals::Signals;
use super::task::{PERIOD, VERSION};
use crate::error::{EXIT_PEER_LOST, Result};
use crate::identity::program_name;
use crate::launch::stop::STOPS;
use crate::launcher::{HOST_ADDRESSES, JOB_NUMBER};
use crate::membership::decide::of_signal;
use crate::membership::lease::LAUNCHER_MAX;
use crate::membership::wire::{ToLauncher, ToRank};
use crate::say::print_line;
use crate::transport::frames::SealedWriter;
use crate::transport::tcp::SECRET;
use crate::waited::Waited;

/// How long an agent without ranks stays, because a launcher that cannot be reached does not end
/// it. One of an elastic job, which may get ranks later, stays until it has not heard from the
/// launcher for too long.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// Where ssh says which addresses it has connected.
pub(super) const SSH_CONNECTION: &str = "SSH_CONNECTION";

/// What the launcher tells an agent.
#[derive(Deserialize, Serialize)]
pub(super) enum AgentOrder {
    /// The first one.
    Prepare(Setup),
    /// Start this process of this rank, with these variables.
    Start(usize, u32, RankVariables),
    /// Kill this process of this rank.
    Kill(usize, u32),
    /// Tell this process of this rank something.
    Tell(usize, u32, ToRank),
    /// Send all ranks this signal.
    Signal(c_int),
    /// The answer to `Alive`, with its number.
    Heard(u64),
}

/// The variables that ranks get from their launcher. There is no way to set others.
#[derive(Clone, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RankVariables {
    pub(super) job_number: Option<String>,
    pub(super) host_addresses: Option<String>,
    /// Over ssh, which encrypts it.
    pub(super) secret: Option<String>,
}

impl RankVariables {
    pub(super) fn pairs(self) -> impl Iterator<Item = (&'static str, String)> {
        let names = [JOB_NUMBER, HOST_ADDRESSES, SECRET];
        let values = [self.job_number, self.host_addresses, self.secret];
        let pairs = names.into_iter().zip(values);
        pairs.filter_map(|(name, value)| Some((name, value?)))
    }
}

/// Where news go; unset for standard output.
static NEWS: OnceLock<Mutex<SealedWriter<File>>> = OnceLock::new();

/// What all ranks of a host have in common.
#[derive(Deserialize, Serialize)]
pub(super) struct Setup {
    pub(super) version: String,
    pub(super) directory: String,
    pub(super) arguments: Vec<String>,
    /// Over ssh. What starts other agents gives each its own.
    pub(super) environment: Vec<(String, String)>,
    /// How many ranks the job has.
    pub(super) size: usize,
    /// How long ranks have to save if the launcher is gone.
    pub(super) grace: Duration,
    /// In an elastic job, which then saves elsewhere: an agent that has not heard from the launcher
    /// for this long ends its ranks.
    pub(super) silence: Option<Duration>,
}

/// What an agent tells its launcher.
#[derive(Deserialize, Serialize)]
pub(super) enum News {
    /// The answer to `Prepare`.
    Ready(Greeting),
    /// The agent gives up: why.
    Refused(String),
    /// This process of this rank has ended, with this status of `wait`.
    Ended(usize, u32, c_int),
    /// It has said something.
    Said(usize, u32, ToLauncher),
    /// It is stopped, or goes on.
    Stopped(usize, u32, bool),
    /// The agent works; how many milliseconds it has.
    Alive(u64),
    /// The agent got a signal to stop, which is meant for the job.
    Signal(c_int),
    /// A rank has printed a line.
    Printed(String),
    /// The agent, or the connection to it, is gone. The launcher tells itself.
    Gone,
}

/// Where other hosts reach this one.
#[derive(Clone, Default, Deserialize, Serialize)]
pub(super) struct Greeting {
    /// This host's address, at which the launcher reached it, and the launcher's, if ssh tells.
    pub(super) own: Option<String>,
    pub(super) launcher: Option<String>,
}

/// Serves a launcher until it is gone. Call it while the process has one thread.
pub fn serve() {
    serve_from(stdin(), None);
}

/// Serves the launcher of these orders until it is gone. Returns the exit code. Without ssh there
/// is a socket for `news`, the launcher does not get the signals that this process gets, and it
/// passes on no environment.
pub(super) fn serve_from(
    orders: impl Read + Send + 'static,
    news: Option<SealedWriter<File>>,
) -> u8 {
    let has_signals = news.is_some();
    news.into_iter()
        .for_each(|news| _ = NEWS.set(Mutex::new(news)));
    let orders = read_orders(orders);
    let Ok(Some(AgentOrder::Prepare(mut setup))) = orders.receiver.recv_timeout(LAUNCHER_MAX)
    else {
        if has_signals {
            print_line(&format!(
                "{}: the launcher has ended, or has taken another process with this number; help: \
                 look at what the launcher says, and give each process its own number (RANK)\n",
                program_name()
            ));
        }
        return EXIT_PEER_LOST;
    };
    if has_signals {
        setup.environment.clear();
    }
    if let Err(why) = prepare(&setup) {
        tell(&News::Refused(why));
        return EXIT_PEER_LOST;
    }
    tell(&News::Ready(greeting()));
    let lease = setup.silence.map(AgentLease::new).transpose();
    let mut ranks = match lease {
        Ok(lease) => HostRanks {
            children: Children::new(lease.is_some()),
            printers: Vec::new(),
            lease,
            last_code: 0,
            job_ended: None,
        },
        Err(error) => {
            tell(&News::Refused(error.to_string()));
            return EXIT_PEER_LOST;
        }
    };
    // When ranks that are left are killed, and when the last rank ended.
    let (mut end_by, mut idle_since) = (None, None);
    let mut waited = Waited::new();
    loop {
        while let Ok(order) = orders.receiver.try_recv() {
            match order {
                Some(AgentOrder::Start(rank, process, variables)) => {
                    idle_since = None;
                    // From now on the launcher may count this host as lost.
                    ranks.lease.iter_mut().for_each(|it| _ = it.is_heard(0));
                    if let Err(error) = ranks.start(&setup, (rank, process), variables) {
                        match &ranks.lease {
                            None => tell(&News::Refused(error.to_string())),
                            // The host has others.
                            Some(_) => {
                                print_line(&format!("{error}\n"));
                                let code = c_int::from(error.exit_code());
                                tell(&News::Ended(rank, process, code << 8));
                            }
                        }
                    }
                }
                Some(AgentOrder::Signal(signal)) => ranks.children.signal(signal),
                Some(AgentOrder::Kill(rank, process)) => ranks.children.kill(rank, process),
                Some(AgentOrder::Tell(rank, process, message)) => {
                    if let ToRank::Ends(code) = message {
                        ranks.job_ended.get_or_insert(code);
                    }
                    ranks.children.tell(rank, process, &message, &[]);
                }
                Some(AgentOrder::Heard(asked_ms)) => {
                    let asked_before = ranks.lease.as_mut().map(|it| it.is_heard(asked_ms));
                    asked_before
                        .iter()
                        .for_each(|it| ranks.children.show_life(*it));
                }
                Some(AgentOrder::Prepare(_)) => {}
                None => {
                    if ranks.lease.is_some() {
                        if ranks.children.is_empty() {
                            return ranks.job_ended.unwrap_or(ranks.last_code);
                        }
                        give_up();
                    }
                    ranks.children.signal(libc::SIGTERM);
                    end_by = Some(Instant::now() + setup.grace);
                }
            }
        }
        for (rank, process, is_stopped) in ranks.children.stopped(waited.after(PERIOD)) {
            tell(&News::Stopped(rank, process, is_stopped));
        }
        if ranks.tell_of_ends() {
            idle_since = Some(Instant::now());
        }
        let is_idle = idle_since.is_some_and(|since| since.elapsed() > IDLE_MAX);
        let is_idle = is_idle && ranks.lease.is_none();
        let is_gone = end_by.is_some_and(|by| ranks.children.is_empty() || Instant::now() >= by);
        if is_idle || is_gone {
            return ranks.last_code;
        }
        let question = ranks.lease.as_mut().and_then(AgentLease::question);
        question.iter().for_each(|ms| tell(&News::Alive(*ms)));
        let signal = orders.signals.next(PERIOD);
        if let Some(signal) = signal.filter(|signal| has_signals && STOPS.contains(signal)) {
            // The launcher may get it, too: that is no second Ctrl-C.
            let is_interrupt = signal == libc::SIGINT;
            tell(&News::Signal(if is_interrupt {
                libc::SIGTERM
            } else {
                signal
            }));
        }
    }
}

struct Orders {
    receiver: Receiver<Option<AgentOrder>>,
    signals: Signals,
}

/// The launcher's orders; None once it is gone.
fn read_orders(orders: impl Read + Send + 'static) -> Orders {
    let signals = Signals::block();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(orders).lines().map_while(Result::ok) {
            if let Ok(order) = serde_json::from_str(&line) {
                _ = sender.send(Some(order));
                Signals::wake();
            }
        }
        _ = sender.send(None);
        Signals::wake();
    });
    Orders { receiver, signals }
}

/// Enters the folder. The error says what is wrong here.
fn prepare(setup: &Setup) -> Result<(), String> {
    if setup.version != VERSION {
        let version = &setup.version;
        return Err(format!(
            "expected version {version} there, got {VERSION}; help: install the same program"
        ));
    }
    let folder = &setup.directory;
    std::env::set_current_dir(folder).map_err(|error| {
        format!("cannot enter {folder}: {error}; help: start in a folder that every host has")
    })
}

fn greeting() -> Greeting {
    let connection = std::env::var(SSH_CONNECTION).unwrap_or_default();
    // The launcher's address and port, then this host's. An address of one link only, as in
    // fe80::1%eth0, means nothing to other hosts.
    let words: Vec<&str> = connection.split(' ').collect();
    let address = |index: usize| {
        let word = words
            .get(index)
            .filter(|word| !word.is_empty() && !word.contains('%'));
        word.map(|word| word.to_string())
    };
    Greeting {
        own: address(2),
        launcher: address(0),
    }
}

/// The ranks of this host, with the threads that tell what they print.
struct HostRanks {
    children: Children,
    printers: Vec<(usize, JoinHandle<()>)>,
    /// In an elastic job.
    lease: Option<AgentLease>,
    /// How the last rank ended.
    last_code: u8,
    /// How the job ends, as the launcher has told the ranks.
    job_ended: Option<u8>,
}

impl HostRanks {
    fn start(
        &mut self,
        setup: &Setup,
        (rank, process): (usize, u32),
        variables: RankVariables,
    ) -> Result<()> {
        let program = std::env::current_exe();
        let program = program.map_err(|error| cannot_start(rank, setup.size, &error))?;
        let mut command = Command::new(program);
        command.args(&setup.arguments).stdout(Stdio::piped());
        command
            .envs(setup.environment.iter().cloned())
            .envs(variables.pairs());
        let place = (rank, process, setup.size);
        let output = self.children.start(place, command)?;
        let printer = output.map(|output| std::thread::spawn(move || pass_on(output)));
        self.printers.extend(printer.map(|printer| (rank, printer)));
        Ok(())
    }

    /// Passes on what ranks have said, and tells which have ended. Whether the last one has.
    fn tell_of_ends(&mut self) -> bool {
        let was_empty = self.children.is_empty();
        for (rank, process, news) in self.children.news() {
            let status = match news {
                RankNews::Said(said) => {
                    tell(&News::Said(rank, process, said));
                    continue;
                }
                RankNews::Ended(status) => status,
            };
            let signal = status.signal().map(of_signal);
            self.last_code = signal.unwrap_or(status.code().unwrap_or_default() as u8);
            // What it has printed comes first.
            let printers = self.printers.extract_if(.., |(of, _)| *of == rank);
            printers.for_each(|(_, printer)| _ = printer.join());
            tell(&News::Ended(rank, process, status.into_raw()));
        }
        !was_empty && self.children.is_empty()
    }
}

fn pass_on(output: ChildStdout) {
    for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
        tell(&News::Printed(String::from_utf8_lossy(&line).into_owned()));
    }
}

/// Tells the launcher. If it is gone, the end of the orders says so.
fn tell(news: &News) {
    let text = serde_json::to_string(news).expect("news are JSON") + "\n";
    if let Some(socket) = NEWS.get() {
        _ = panics::lock(socket).write_all(text.as_bytes());
        return;
    }
    let mut stdout = stdout().lock();
    _ = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
}
