//! Helpers of the NCCL tests: ranks in one process, processes that are ranks, buffers, and expected
//! sums.

use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::Release;
use std::time::Instant;

use cudarc::driver::sys::CUstream;

use crate::copy::{cuMemcpyDtoH_v2, cuMemcpyHtoDAsync_v2};
use crate::error::CUresult;
use crate::machine::LockedMachine;
use crate::machine::testing::{CASE, Ended, device, made, ok};
use crate::memory::calls::cuMemAlloc_v2;
use crate::nccl::calls::*;
use crate::nccl::comm::Comm;
use crate::nccl::comm_calls::*;
use crate::nccl::element::CHUNK_ELEMENTS;
use crate::nccl::entry::{ncclGetLastError, resolve};
use crate::nccl::refusal::code;
use crate::nccl::segment::UniqueId;
use crate::stream::calls::cuStreamSynchronize;

pub(super) const SUM: c_int = 0;
pub(super) const F32: c_int = 7;
pub(super) const NON_BLOCKING: u32 = 1;

/// A call of NCCL that is to succeed.
#[track_caller]
pub(super) fn done(result: c_int) {
    assert_eq!(result, code::SUCCESS, "{}", last_error());
}

pub(super) fn last_error() -> String {
    // SAFETY: the text is of this library, and ends in zero.
    unsafe { CStr::from_ptr(ncclGetLastError(null_mut())) }
        .to_string_lossy()
        .into_owned()
}

pub(super) fn new_id() -> UniqueIdByValue {
    let mut id = MaybeUninit::uninit();
    done(ncclGetUniqueId(Some(&mut id)));
    // SAFETY: ncclGetUniqueId succeeded, so it wrote the id.
    let internal = unsafe { id.assume_init() };
    UniqueIdByValue { internal }
}

pub(super) fn init(ranks: usize, id: UniqueIdByValue, rank: usize) -> *mut Comm {
    let mut comm = MaybeUninit::uninit();
    done(ncclCommInitRank(
        Some(&mut comm),
        ranks as c_int,
        id,
        rank as c_int,
    ));
    // SAFETY: the call has succeeded.
    unsafe { comm.assume_init() }
}

/// This rank has made its part of all connections.
pub(super) fn connected(comm: *mut Comm) {
    let mut held = LockedMachine::take();
    let comm = resolve(&mut held, comm).expect("a communicator");
    let asked = &comm.segment.member(comm.rank).connects;
    asked.iter().for_each(|asked| asked.store(1, Release));
}

/// Device memory with these values, on the current device. They are there.
pub(super) fn upload(values: &[f32]) -> u64 {
    let pointer = made(|pointer| cuMemAlloc_v2(pointer, 4 * values.len().max(1)));
    // SAFETY: the values are as long as is said.
    ok(unsafe {
        cuMemcpyHtoDAsync_v2(
            pointer,
            values.as_ptr().cast(),
            4 * values.len(),
            null_mut(),
        )
    });
    ok(cuStreamSynchronize(null_mut()));
    pointer
}

pub(super) fn download(pointer: u64, count: usize) -> Vec<f32> {
    let mut values = vec![0f32; count];
    // SAFETY: the place is as long as is said.
    ok(unsafe { cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), pointer, 4 * count) });
    values
}

/// What rank `rank` gives to a sum: thirds of small numbers, whose sums depend on the order.
pub(super) fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count)
        .map(|at| ((at * 7 + rank * 13) % 29) as f32 / 3.0 + rank as f32 * 1000.0)
        .collect()
}

/// The sum as the documentation of `element` has it, written down anew: element by element, from
/// the start of its chunk around the ring.
pub(super) fn ring_sum(ranks: usize, at: usize, first: usize, value: impl Fn(usize) -> f32) -> f32 {
    let start = at / CHUNK_ELEMENTS + first;
    (1..ranks).fold(value(start % ranks), |sum, hop| {
        value((start + hop) % ranks) + sum
    })
}

pub(super) fn all_reduce(
    from: u64,
    to: u64,
    count: usize,
    comm: *mut Comm,
    stream: CUstream,
) -> c_int {
    ncclAllReduce(from as _, to as _, count, F32, SUM, comm, stream)
}

const RANK: &str = "SIMCUDA_TEST_RANK";
const RANKS: &str = "SIMCUDA_TEST_RANKS";
const ID: &str = "SIMCUDA_TEST_ID";

/// A process that plays a case as one of several ranks.
pub(super) struct Rank {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) id: UniqueIdByValue,
    pub(super) began: Instant,
}

impl Rank {
    /// Device and communicator, with its connections.
    pub(super) fn start(&self) -> *mut Comm {
        let comm = self.start_unconnected();
        connected(comm);
        comm
    }

    pub(super) fn start_unconnected(&self) -> *mut Comm {
        device(self.rank as i32);
        init(self.ranks, self.id, self.rank)
    }
}

/// The processes of a case that is being played.
pub(super) struct Job {
    pub(super) children: Vec<Child>,
}

impl Job {
    /// Waits for all to end.
    pub(super) fn ended(self) -> Vec<Ended> {
        let outputs = self
            .children
            .into_iter()
            .map(|child| child.wait_with_output().expect("a child can be waited for"));
        let ended = outputs.map(|output| Ended {
            code: output.status.code(),
            text: String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr),
        });
        ended.collect()
    }
}

/// Plays `case` in as many processes as there are ranks, each on its own device. In those processes
/// it plays its part, and nothing is returned.
pub(super) fn start(
    test: &str,
    ranks: usize,
    variables: &[(&str, &str)],
    case: impl FnOnce(Rank),
) -> Option<Job> {
    if std::env::var_os(CASE).is_some() {
        let text = |name| std::env::var(name).expect("whoever starts a case sets it");
        let mut id = [0; 128];
        for (byte, digits) in id.iter_mut().zip(text(ID).as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).expect("digits are ASCII");
            *byte = u8::from_str_radix(digits, 16).expect("an id is written in hexadecimal");
        }
        let number = |name| text(name).parse().expect("a number");
        let (rank, ranks) = (number(RANK), number(RANKS));
        case(Rank {
            rank,
            ranks,
            id: UniqueIdByValue { internal: id },
            began: Instant::now(),
        });
        return None;
    }
    let test = test.strip_prefix("ddp_simcuda::").unwrap_or(test);
    // The memory behind it is this process's until it ends.
    let made = crate::nccl::segment::Made::new().expect("there is shared memory");
    let id: UniqueId = made.id;
    std::mem::forget(made);
    let id: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let child = |rank: usize| {
        Command::new(std::env::current_exe().expect("a test knows its program"))
            .args([test, "--exact", "--nocapture"])
            .env(CASE, "1")
            .env(RANK, rank.to_string())
            .env(RANKS, ranks.to_string())
            .env(ID, &id)
            .env("OMPI_COMM_WORLD_RANK", rank.to_string())
            .env("SIMCUDA_DEVICES", ranks.to_string())
            .env("SIMCUDA_MEMORY_MB", "64")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a test can start its program again")
    };
    Some(Job {
        children: (0..ranks).map(child).collect(),
    })
}

/// As [`start`], and waits for the end.
pub(super) fn played(
    test: &str,
    ranks: usize,
    variables: &[(&str, &str)],
    case: impl FnOnce(Rank),
) -> Option<Vec<Ended>> {
    start(test, ranks, variables, case).map(Job::ended)
}

/// All came to their end, and the simulator had nothing to say.
#[track_caller]
pub(super) fn all_clean(ended: &[Ended]) {
    ended.iter().for_each(Ended::is_clean);
}

/// The full name of a test, for [`played`].
macro_rules! name {
    ($name:ident) => {
        concat!(module_path!(), "::", stringify!($name))
    };
}
pub(super) use name;

pub(super) const SUCCESS: CUresult = CUresult::CUDA_SUCCESS;
