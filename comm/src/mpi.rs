//! MPI, as far as this crate needs it: start and end, communicators, and bytes that travel in buffers that are handed over.
//! The only file that names the crate `mpi`. Nothing here blocks: requests are tested, and the waiting is the caller's.

mod collective;

use std::ffi::{c_char, c_int};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

use mpi::environment::{Threading, Universe, initialize_with_threading};
use mpi::ffi;

pub(crate) use self::collective::Mpi;
use crate::error::{Cause, Error, Ranks, Result, Seconds};
use crate::waited::Waited;
use crate::world::{is_first_of_host, launcher_folder, turn};

/// MPI, initialised. Dropped without `finalize` it is left as it is, for a process that ends because of a failure.
pub(crate) struct Job {
    universe: Option<Universe>,
    threads_may_call: bool,
    world: Comm,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job").field("threads_may_call", &self.threads_may_call).finish_non_exhaustive()
    }
}

impl Job {
    /// Initialises MPI. Returns when all ranks of the job have.
    pub(crate) fn start() -> Result<Job> {
        let Some((universe, threading)) = initialize_with_threading(Threading::Multiple) else {
            return Err(Error::Setup {
                action: "start MPI".into(),
                reason: "it is initialised already".into(),
                way_out: "Connect one world a process, and leave MPI_Init to it.".into(),
            });
        };
        // SAFETY: MPI is initialised, and this handle a constant of its since.
        let world = Comm { raw: unsafe { ffi::RSMPI_COMM_WORLD } };
        // SAFETY: as above. From now on what fails on it, and on all duplicates, returns instead of aborting.
        check(unsafe { ffi::MPI_Comm_set_errhandler(world.raw, ffi::RSMPI_ERRORS_RETURN) }, "set up MPI")?;
        Ok(Job { universe: Some(universe), threads_may_call: threading == Threading::Multiple, world })
    }

    /// All ranks.
    pub(crate) fn world(&self) -> &Comm {
        &self.world
    }

    /// Whether several threads may use MPI at the same time.
    pub(crate) fn threads_may_call(&self) -> bool {
        self.threads_may_call
    }

    /// Ends MPI in good order. Every rank does, and waits in it for the others.
    pub(crate) fn finalize(mut self) {
        drop(self.universe.take());
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // Dropping the universe would wait for all other ranks, which after a failure never come.
        std::mem::forget(self.universe.take());
    }
}

/// Has the launcher end all ranks with `exit_code`. Does not return.
pub(crate) fn abort(exit_code: u8) {
    // SAFETY: MPI_Abort may be called from any thread of a process that has initialised MPI, which whoever can fail
    // between hosts has.
    unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, c_int::from(exit_code)) };
}

fn check(code: c_int, action: &str) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    // More than the longest text of any MPI library (MPICH's 1024).
    let mut text = [0u8; 2048];
    let mut length: c_int = 0;
    // SAFETY: the buffer is longer than MPI_MAX_ERROR_STRING, and both places are written before the call returns.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    let length = usize::try_from(length).unwrap_or(0).min(text.len());
    Err(Error::Setup {
        action: action.to_string(),
        reason: String::from_utf8_lossy(&text[..length]).trim_end_matches('\0').to_string(),
        way_out: "Look above for what the MPI library or the launcher said, and whether another rank or host is gone."
            .to_string(),
    })
}

/// Ranks that can send to each other; what is sent on one communicator is never received on another.
pub(crate) struct Comm {
    raw: ffi::MPI_Comm,
}

// SAFETY: a communicator is a handle that MPI lets every thread use where `threads_may_call`; where it does not, the world
// gives out no communicator besides the one its bootstrap uses on its own thread.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

impl std::fmt::Debug for Comm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Comm")
    }
}

/// The most bytes of one message.
pub(crate) const MESSAGE_BYTES_MAX: usize = 1 << 20;

impl Comm {
    /// This rank.
    pub(crate) fn rank(&self) -> usize {
        let mut rank: c_int = 0;
        // SAFETY: a communicator of ours, and a place the call writes before it returns.
        unsafe { ffi::MPI_Comm_rank(self.raw, &mut rank) };
        rank as usize
    }

    /// How many ranks.
    pub(crate) fn size(&self) -> usize {
        let mut size: c_int = 0;
        // SAFETY: as in `rank`.
        unsafe { ffi::MPI_Comm_size(self.raw, &mut size) };
        size as usize
    }

    /// The same ranks again. All ranks call this in the same order.
    pub(crate) fn duplicate(&self, timeout: Duration) -> Result<Comm> {
        const ACTION: &str = "make a group of ranks";
        self.roll_call(timeout, ACTION)?;
        // SAFETY: the handle is a constant of MPI.
        let mut new = Box::new(unsafe { ffi::RSMPI_COMM_NULL });
        let mut request = Request::new(Vec::new());
        // SAFETY: MPI writes `new` until the request is complete: it has its own place in memory, which is given up
        // for good below if that never happens.
        let code = unsafe { ffi::MPI_Comm_idup(self.raw, &mut *new, &mut request.raw) };
        check(code, ACTION)?;
        if let Err(error) = request.wait(timeout, ACTION) {
            std::mem::forget(new);
            return Err(error);
        }
        Ok(Comm { raw: *new })
    }

    /// Starts to send `bytes` to rank `to`.
    pub(crate) fn send(&self, bytes: Arc<[u8]>, to: usize, tag: c_int) -> Result<Request> {
        assert!(bytes.len() <= MESSAGE_BYTES_MAX);
        let mut request = Request::new(Vec::new());
        // SAFETY: the request holds the bytes until MPI is done with them, or gives them up for good; nobody can write
        // them meanwhile.
        let code = unsafe {
            let (start, count) = (bytes.as_ptr().cast(), bytes.len() as c_int);
            ffi::MPI_Isend(start, count, ffi::RSMPI_UINT8_T, to as c_int, tag, self.raw, &mut request.raw)
        };
        request.sent = Some(bytes);
        check(code, "send through MPI")?;
        Ok(request)
    }

    /// Starts to receive `count` bytes from rank `from`.
    pub(crate) fn receive(&self, count: usize, from: usize, tag: c_int) -> Result<Request> {
        assert!(count <= MESSAGE_BYTES_MAX);
        let mut request = Request::new(vec![0; count]);
        // SAFETY: the request owns the bytes until MPI is done with them, or gives them up for good; nobody looks at them
        // before.
        let code = unsafe {
            let (start, count) = (request.received.as_mut_ptr().cast(), count as c_int);
            ffi::MPI_Irecv(start, count, ffi::RSMPI_UINT8_T, from as c_int, tag, self.raw, &mut request.raw)
        };
        check(code, "receive through MPI")?;
        Ok(request)
    }

    /// The `block` of every rank, all of one length. For bringing ranks together, before there is a better way.
    pub(crate) fn all_gather(&self, block: Vec<u8>, timeout: Duration) -> Result<Vec<Vec<u8>>> {
        const ACTION: &str = "exchange addresses between ranks";
        self.roll_call(timeout, ACTION)?;
        let each = block.len();
        let mut everything = vec![0u8; each * self.size()];
        let mut request = Request::new(block);
        // SAFETY: MPI reads the block and writes `everything` until the request is complete; both are given up for good
        // if that never happens.
        let code = unsafe {
            let (from, to) = (request.received.as_ptr().cast(), everything.as_mut_ptr().cast());
            let (count, kind) = (each as c_int, ffi::RSMPI_UINT8_T);
            ffi::MPI_Iallgather(from, count, kind, to, count, kind, self.raw, &mut request.raw)
        };
        check(code, ACTION)?;
        if let Err(error) = request.wait(timeout, ACTION) {
            std::mem::forget(everything);
            return Err(error);
        }
        Ok(everything.chunks(each.max(1)).map(<[u8]>::to_vec).collect())
    }

    /// Returns when all ranks have come here. Rank 0 hears of each, and lets all go on or says who did not come; then the
    /// others, who have heard it, need not say it too.
    fn roll_call(&self, timeout: Duration, action: &str) -> Result<()> {
        match self.rank() {
            0 => self.call_roll(timeout, action),
            rank => self.answer_roll(rank, timeout, action),
        }
    }

    fn call_roll(&self, timeout: Duration, action: &str) -> Result<()> {
        let others = 1..self.size();
        let (mut arriving, mut under_way) = (Vec::with_capacity(others.len()), Vec::with_capacity(2 * others.len()));
        for rank in others {
            under_way.push(self.send(Arc::from([0u8]), rank, TAG_HERE)?);
            arriving.push((rank, self.receive(1, rank, TAG_HERE)?));
        }
        let (mut waited, mut pause, mut slept) = (Waited::new(), Pause::default(), Duration::ZERO);
        let mut here = Vec::with_capacity(arriving.len());
        let missing = loop {
            let mut absent = Vec::new();
            for (rank, mut request) in arriving {
                match request.is_done()? {
                    true => here.push(rank),
                    false => absent.push((rank, request)),
                }
            }
            arriving = absent;
            if arriving.is_empty() || waited.after(slept) >= timeout {
                break arriving.iter().map(|(rank, _)| *rank).collect::<Vec<usize>>();
            }
            slept = pause.sleep();
        };
        let verdict = match missing.is_empty() {
            true => String::new(),
            false => format!("{} did not come within {}", Ranks(&missing), Seconds(timeout)),
        };
        let mut answer = verdict.as_bytes()[..verdict.floor_char_boundary(ANSWER_BYTES)].to_vec();
        answer.resize(ANSWER_BYTES, 0);
        let answer: Arc<[u8]> = answer.into();
        for rank in here {
            under_way.push(self.send(Arc::clone(&answer), rank, TAG_GO)?);
        }
        if missing.is_empty() {
            return under_way.iter_mut().try_for_each(|request| request.wait(timeout, action));
        }
        let (mut waited, mut pause, mut slept) = (Waited::new(), Pause::default(), Duration::ZERO);
        while waited.after(slept) < ANSWER_PATIENCE {
            under_way.retain_mut(|request| matches!(request.is_done(), Ok(false)));
            slept = pause.sleep();
        }
        Err(too_late(action, verdict))
    }

    fn answer_roll(&self, rank: usize, timeout: Duration, action: &str) -> Result<()> {
        let mut here = self.send(Arc::from([0u8]), 0, TAG_HERE)?;
        let mut hello = self.receive(1, 0, TAG_HERE)?;
        let mut answer = self.receive(ANSWER_BYTES, 0, TAG_GO)?;
        let patience = timeout.saturating_add(turn(rank));
        // Rank 0 may come later than this one, and then waits longer for the others.
        for request in [&mut hello, &mut answer, &mut here] {
            if !request.is_done_within(patience)? {
                let error = too_late(action, format!("rank 0 did not come within {}", Seconds(timeout)));
                return Err(said_once(error));
            }
        }
        let answer = answer.into_bytes();
        let text = String::from_utf8_lossy(&answer).trim_end_matches('\0').to_string();
        if text.is_empty() {
            return Ok(());
        }
        // Rank 0 says it first.
        std::thread::sleep(ANSWER_PATIENCE);
        Err(said_by(0, too_late(action, text)))
    }

    /// A message that has come with this tag from anyone: who sent it, and how many bytes it has.
    pub(crate) fn arrived(&self, tag: c_int) -> Result<Option<(usize, usize)>> {
        let (mut flag, mut count): (c_int, c_int) = (0, 0);
        let mut status = MaybeUninit::<ffi::MPI_Status>::zeroed();
        // SAFETY: all places are written before the calls return; a status of all zeros is a value of that plain struct.
        unsafe {
            let code = ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, tag, self.raw, &mut flag, status.as_mut_ptr());
            check(code, "listen to other hosts")?;
            if flag == 0 {
                return Ok(None);
            }
            ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut count);
            Ok(Some((status.assume_init().MPI_SOURCE as usize, usize::try_from(count).unwrap_or(0))))
        }
    }
}

/// Of a roll call: that a rank is here, and what rank 0 answers; how long the answer is, and may take.
const TAG_HERE: c_int = 101;
const TAG_GO: c_int = 102;
const ANSWER_BYTES: usize = 256;
const ANSWER_PATIENCE: Duration = Duration::from_millis(300);

/// The error of a rank that waited in vain.
fn too_late(action: &str, reason: String) -> Error {
    Error::Setup {
        action: action.to_string(),
        reason,
        way_out: "See whether they are stopped or still starting; --timeout-s sets how long to wait.".to_string(),
    }
}

/// An error that all ranks find by themselves, for the first of a host to print.
fn said_once(error: Error) -> Error {
    if is_first_of_host(launcher_folder().as_deref()) {
        return error;
    }
    std::thread::sleep(ANSWER_PATIENCE);
    said_by(0, error)
}

/// An error that another rank of this job prints.
fn said_by(rank: usize, error: Error) -> Error {
    let (exit_code, text) = (error.exit_code(), error.to_string());
    Error::PeerFailed(Box::new(Cause { rank, host: "this job".into(), exit_code, text }))
}

/// A message under way, and its bytes. Dropped before it is done, its memory is given up for good.
pub(crate) struct Request {
    raw: ffi::MPI_Request,
    sent: Option<Arc<[u8]>>,
    received: Vec<u8>,
}

// SAFETY: a request is a handle that any thread may test where `Job::threads_may_call`, one at a time: `&mut self`.
unsafe impl Send for Request {}

impl Request {
    /// Nothing under way yet.
    fn new(received: Vec<u8>) -> Request {
        // SAFETY: the handle is a constant of MPI.
        Request { raw: unsafe { ffi::RSMPI_REQUEST_NULL }, sent: None, received }
    }

    fn is_null(&self) -> bool {
        // SAFETY: as above.
        self.raw == unsafe { ffi::RSMPI_REQUEST_NULL }
    }

    /// Whether MPI is done with it. Lets MPI work on everything under way.
    pub(crate) fn is_done(&mut self) -> Result<bool> {
        let mut flag: c_int = 0;
        // SAFETY: a request of ours, which the call sets to null when it is done.
        let code = unsafe { ffi::MPI_Test(&mut self.raw, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
        check(code, "move data between ranks through MPI")?;
        Ok(flag != 0)
    }

    /// The bytes received.
    pub(crate) fn into_bytes(mut self) -> Vec<u8> {
        assert!(self.is_null(), "a message is read before it has come");
        std::mem::take(&mut self.received)
    }

    fn wait(&mut self, timeout: Duration, action: &str) -> Result<()> {
        match self.is_done_within(timeout)? {
            true => Ok(()),
            false => Err(said_once(too_late(action, format!("not all ranks came within {}", Seconds(timeout))))),
        }
    }

    /// Whether MPI is done with it before `timeout` has passed.
    fn is_done_within(&mut self, timeout: Duration) -> Result<bool> {
        let (mut waited, mut pause, mut slept) = (Waited::new(), Pause::default(), Duration::ZERO);
        while !self.is_done()? {
            if waited.after(slept) >= timeout {
                return Ok(false);
            }
            slept = pause.sleep();
        }
        Ok(true)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if !self.is_null() {
            // MPI may still read the one and write the other.
            std::mem::forget((self.sent.take(), std::mem::take(&mut self.received)));
        }
    }
}

/// Sleeps that grow from 20 µs to 1 ms: soon there when it is short, and no core burnt when it is long.
#[derive(Debug)]
pub(crate) struct Pause(Duration);

impl Default for Pause {
    fn default() -> Pause {
        Pause(Duration::from_micros(20))
    }
}

impl Pause {
    /// Sleeps, for the time that it gives back.
    pub(crate) fn sleep(&mut self) -> Duration {
        std::thread::sleep(self.0);
        let longer = (self.0 * 3 / 2).min(Duration::from_millis(1));
        std::mem::replace(&mut self.0, longer)
    }
}
