//! What the ranks of these tests do. `mpirun` starts this test binary: with a role in the
//! environment it plays that role instead of running tests, before `main` and other threads.

use std::fmt::Debug;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ddp_comm::{Error, Group, NcclChoice, Options, Reduce, Remedy, Result, World};
use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};

use crate::gpu_rank;

/// The role of the rank, and its arguments.
pub(crate) const ROLE: &str = "DDP_TEST_ROLE";
pub(crate) const FOLDER: &str = "DDP_TEST_FOLDER";
/// The file of the folder with which the test lets ranks end that make steps.
pub(crate) const END: &str = "end";
pub(crate) const TIMEOUT_MS: &str = "DDP_TEST_TIMEOUT_MS";
pub(crate) const JOIN_TIMEOUT_MS: &str = "DDP_TEST_JOIN_TIMEOUT_MS";
/// Set where there are fewer GPUs than ranks, as `launch/gpu-check` does: ranks may share them.
pub(crate) const SHARE_GPUS: &str = "DDP_TEST_SHARE_GPUS";
/// Set to leave the order of sums to NCCL.
pub(crate) const FAST: &str = "DDP_TEST_NCCL_FAST";

// Constructors of a program run on its only thread, before `main`. This one returns if there is no
// role.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    // As Rust's own start does: the reader of the output may be gone.
    // SAFETY: this is the only thread, and ignoring a signal runs no code.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    tracing::subscriber::set_global_default(Warnings).expect("no other subscriber is set");
    let timeout_ms = std::env::var(TIMEOUT_MS)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(60_000);
    if role == "init only" {
        init_only();
    }
    let join_timeout_ms = std::env::var(JOIN_TIMEOUT_MS)
        .ok()
        .and_then(|text| text.parse().ok());
    let defaults = Options::default();
    let (timeout, share_gpus) = (
        Duration::from_millis(timeout_ms),
        std::env::var_os(SHARE_GPUS).is_some(),
    );
    let options = Options {
        timeout,
        join_timeout: join_timeout_ms.map_or(defaults.join_timeout, Duration::from_millis),
        program: "ddp-train".into(),
        share_gpus,
        catches_stop: false,
        nccl: match std::env::var_os(FAST) {
            Some(_) => NcclChoice::Fast,
            None => NcclChoice::Fixed,
        },
        remedy_text: |remedy| match remedy {
            Remedy::LongerTimeout => "--timeout-s sets how long to wait",
            Remedy::ShareGpus => "--share-gpus lets several ranks use one",
            Remedy::NoGraphs => "--graph off runs steps without graphs",
            _ => "",
        },
    };
    let world = match World::connect(&options) {
        Ok(world) => world,
        Err(error) => {
            if !matches!(error, Error::PeerFailed(_)) {
                let remedy = error.remedy().map_or("", options.remedy_text);
                eprintln!("ddp-train: {error}; {remedy}");
            }
            std::process::exit(i32::from(error.exit_code()));
        }
    };
    world.install_panic_hook();
    if let Err(error) = world.watch().and_then(|()| play(&role, &world)) {
        let remedy = error.remedy().map_or("", options.remedy_text);
        world.fail(&format!("{error}; {remedy}"), error.exit_code());
    }
    drop(world);
    std::process::exit(0);
}

/// A rank that starts MPI and does nothing else.
fn init_only() -> ! {
    unsafe extern "C" {
        fn MPI_Init(count: *mut i32, words: *mut *mut *mut i8) -> i32;
    }
    // SAFETY: MPI reads no arguments if they are null, and this is the only thread.
    unsafe { MPI_Init(std::ptr::null_mut(), std::ptr::null_mut()) };
    wait_to_be_ended()
}

/// Does nothing until the job ends this process.
pub(crate) fn wait_to_be_ended() -> ! {
    // Sleep: longer than the test waits for the end of the job.
    std::thread::sleep(Duration::from_secs(600));
    std::process::exit(1)
}

/// A file of the job's folder, which all its ranks and the test see.
fn in_folder(name: &str) -> PathBuf {
    PathBuf::from(std::env::var_os(FOLDER).expect("the test names a folder")).join(name)
}

/// Writes a line for the test to read to this rank's file: mpirun mixes what ranks print.
pub(crate) fn tell(what: &str, value: impl Debug) {
    let file = in_folder(&std::process::id().to_string());
    let mut file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(file)
        .expect("the folder is there");
    writeln!(file, "{what}: {value:?}").expect("the folder has room");
}

pub(crate) fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64)
}

/// Tells the processor time that this process uses while `body` runs, as a share of the time that
/// passes.
pub(crate) fn tell_cpu_share<T>(body: impl FnOnce() -> T) -> T {
    let (began, before_ms) = (Instant::now(), cpu_ms());
    let result = body();
    let passed_ms = began.elapsed().as_millis() as f64;
    tell("cpu share", (cpu_ms() - before_ms) as f64 / passed_ms);
    result
}

/// The processor time that this process has used on all its threads.
fn cpu_ms() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes the variable it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

/// Prints warnings.
struct Warnings;

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut |_: &tracing::field::Field, value: &dyn Debug| {
            eprintln!("warning: {value:?}")
        });
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

fn play(role: &str, world: &World) -> Result<()> {
    tell("pid", std::process::id());
    tell("job", std::env::var("PMIX_NAMESPACE").unwrap_or_default());
    let words: Vec<&str> = role.split_whitespace().collect();
    match words[..] {
        ["facts"] => facts(world),
        ["gpu", ref words @ ..] => gpu_rank::play(words, world),
        ["fault", kind, rank, others] => fault(world, kind, rank.parse().unwrap_or(0), others),
        ["late", rank] => {
            world.barrier()?;
            let other_waits = in_folder("waits");
            if rank == world.rank().to_string() {
                while !other_waits.exists() {
                    // Sleep: what is waited for is looked at.
                    std::thread::sleep(Duration::from_millis(5));
                }
                // Sleep: the other rank would spin meanwhile if it did not sleep.
                std::thread::sleep(Duration::from_secs(2));
                return world.barrier();
            }
            tell_cpu_share(|| {
                std::fs::write(&other_waits, "").expect("the folder has room");
                world.barrier()
            })?;
            // Sleep: now the late rank waits, in `drop`.
            std::thread::sleep(Duration::from_millis(500));
            Ok(())
        }
        // Finishes its work like the others, but never ends MPI.
        ["stays", rank] => {
            if rank == world.rank().to_string() {
                world.barrier()?;
                wait_to_be_ended();
            }
            Ok(())
        }
        ["steps"] => {
            let (group, stream) = (world.group("gradients")?, Stream::default_of(Device::Cpu)?);
            let tensor = Tensor::ones(&[1000], DType::F32, Device::Cpu)?.named("gradient");
            steps(&group, || group.all_reduce(&tensor, Reduce::Sum, &stream))
        }
        // The last rank works for longer than the timeout, and shows it.
        ["slow", kind] => {
            world.barrier()?;
            if world.rank() + 1 == world.size() {
                for _ in 0..210 {
                    heartbeat::beat(Work::ReadsData);
                    // Sleep: all of them take longer than the timeout, `EXPIRES_MS`.
                    std::thread::sleep(Duration::from_millis(100));
                }
                tell("fault", now_ms());
                commit(world, kind)?;
            }
            world.barrier()
        }
        _ => panic!("no such role: {role}"),
    }
}

/// Makes steps, of which the test is told, until it lets the job end (`Running::let_end`).
pub(crate) fn steps(group: &Group, step: impl Fn() -> Result<()>) -> Result<()> {
    step()?;
    tell("steps", group.rank());
    while !group.all_agree(in_folder(END).exists())? {
        // Sleep: leaves the cores to other tests.
        std::thread::sleep(Duration::from_millis(5));
        step()?;
    }
    Ok(())
}

fn facts(world: &World) -> Result<()> {
    tell(
        &format!("place {}", world.rank()),
        (
            world.size(),
            world.local_rank(),
            world.local_size(),
            world.hosts(),
            world.host(),
            world.transport(),
        ),
    );
    let hello = world.all_gather_bytes(format!("rank {}", world.rank()).as_bytes())?;
    tell(
        "hello",
        hello
            .iter()
            .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
            .collect::<Vec<_>>(),
    );
    let mut word = format!("from {}", world.rank()).into_bytes();
    world.broadcast_bytes(&mut word, world.size() - 1)?;
    tell("word", String::from_utf8_lossy(&word));
    tell("listening", listening());
    assert!(ddp_kernels::panics::caught(|| panic!("handled")).is_none());
    world.barrier()
}

/// The addresses, in the kernel's notation, on which this process listens beyond this machine.
fn listening() -> Vec<String> {
    let links = std::fs::read_dir("/proc/self/fd")
        .into_iter()
        .flatten()
        .flatten();
    let own: Vec<String> = links
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .filter_map(|link| {
            Some(
                link.to_str()?
                    .strip_prefix("socket:[")?
                    .strip_suffix(']')?
                    .to_string(),
            )
        })
        .collect();
    let mut found = Vec::new();
    for table in [
        "/proc/self/net/tcp",
        "/proc/self/net/tcp6",
        "/proc/self/net/udp",
        "/proc/self/net/udp6",
    ] {
        for line in std::fs::read_to_string(table)
            .unwrap_or_default()
            .lines()
            .skip(1)
        {
            let columns: Vec<&str> = line.split_whitespace().collect();
            let (address, state, inode) = (columns[1], columns[3], columns[9]);
            // 127.0.0.1 and ::1 in the kernel's byte order; 0A is a listening TCP socket, 07 an
            // unconnected UDP one.
            let local = address.starts_with("0100007F:")
                || address.starts_with("00000000000000000000000001000000:");
            if own.iter().any(|own| own == inode) && ["0A", "07"].contains(&state) && !local {
                found.push(format!("{table} {address}"));
            }
        }
    }
    found
}

/// All ranks reduce repeatedly, or compute, until `faulty` fails.
fn fault(world: &World, kind: &str, faulty: usize, others: &str) -> Result<()> {
    let (group, stream) = (world.group("gradients")?, Stream::default_of(Device::Cpu)?);
    let tensor = Tensor::ones(&[1000], DType::F32, Device::Cpu)?.named("gradient");
    for step in 0..600 {
        if step == 20 && world.rank() == faulty {
            tell("fault", now_ms());
            commit(world, kind)?;
        }
        let reduce = if kind == "other" && step == 20 && world.rank() == faulty {
            Reduce::Max
        } else {
            Reduce::Sum
        };
        if step >= 20 && others == "compute" {
            wait_to_be_ended();
        }
        group.all_reduce(&tensor, reduce, &stream)?;
    }
    wait_to_be_ended()
}

/// Ends or stops this process.
pub(crate) fn raise(signal: i32) {
    // SAFETY: raises a signal that ends or stops this process.
    unsafe { libc::raise(signal) };
}

pub(crate) fn commit(world: &World, kind: &str) -> Result<()> {
    match kind {
        "panic" => panic!("seven is not a number"),
        "error" => world.fail(&"the loss is not finite", 76),
        "kill" => raise(libc::SIGKILL),
        "stop" => raise(libc::SIGSTOP),
        "exit" => std::process::exit(0),
        "none" | "other" => {}
        _ => panic!("no such fault: {kind}"),
    }
    Ok(())
}
