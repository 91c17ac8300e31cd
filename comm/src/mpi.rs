//! MPI, as far as this crate needs it: start and end, communicators, and bytes that travel in buffers that are handed over.
//! The only file that names the crate `mpi`. Nothing here blocks: requests are tested, and the waiting is the caller's.

mod bytes;
mod collective;

use std::ffi::{c_char, c_int};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mpi::environment::{Threading, Universe, initialize_with_threading};
use mpi::ffi;

pub(crate) use self::bytes::{lend, lend_mut};
pub(crate) use self::collective::Mpi;
use crate::error::{Error, Result};

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
        // SAFETY: the handle is a constant of MPI.
        let mut new = Box::new(unsafe { ffi::RSMPI_COMM_NULL });
        let mut request = Request::new(Vec::new());
        // SAFETY: MPI writes `new` until the request is complete: it has its own place in memory, which is given up
        // for good below if that never happens.
        let code = unsafe { ffi::MPI_Comm_idup(self.raw, &mut *new, &mut request.raw) };
        check(code, "make a group of ranks")?;
        if let Err(error) = request.wait(timeout, "make a group of ranks") {
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
        let (started, mut pause) = (Instant::now(), Pause::default());
        while !self.is_done()? {
            if started.elapsed() >= timeout {
                return Err(Error::Setup {
                    action: action.to_string(),
                    reason: format!("not all ranks came within {} s", timeout.as_secs()),
                    way_out: "See whether ranks are stopped or still starting; --timeout-s sets how long to wait."
                        .to_string(),
                });
            }
            pause.sleep();
        }
        Ok(())
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
    pub(crate) fn sleep(&mut self) {
        std::thread::sleep(self.0);
        self.0 = (self.0 * 3 / 2).min(Duration::from_millis(1));
    }
}
