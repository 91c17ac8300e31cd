//! Which errors are the loss of a rank, after which the others continue, and which end only
//! this process.

use ddp_comm::World;
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Error as TensorError};

use crate::error::{Error, Result};
use crate::setting::{DEVICES_PER_RANK, MIN_RANKS};
use crate::step::Step;

/// Exit codes: no memory, and a file that cannot be read or written.
const EXIT_MEMORY: u8 = 71;
const EXIT_IO: u8 = 74;
/// The exit code of a job that ends because a rank was lost or hangs.
pub(crate) const EXIT_LOST: u8 = 77;

/// Whether the ranks of `world` continue after this error. If a GPU of this rank has failed, this
/// ends the process, and the others continue.
pub(crate) fn continues_after(error: &Error, world: &World, devices: &[Device]) -> bool {
    if !world.is_elastic() {
        return false;
    }
    use ddp_comm::Error::{Broken, Nccl, Timeout};
    if let Error::Comm(error) = error
        && (matches!(error, Timeout { .. }) || error.is_rank_lost())
    {
        return true;
    }
    // After a failure that stays, a GPU refuses any work.
    let refuses = |device: &Device| Stream::current(*device)?.record().map(drop);
    if devices.iter().any(|device| refuses(device).is_err()) {
        world.leave(error, EXIT_LOST);
    }
    if let Error::Comm(lost @ Nccl(_)) = error
        && lost.exit_code() == EXIT_LOST
    {
        // NCCL missed another rank, or the network: if that lasts, the step does not end again.
        return true;
    }
    // The end of calls that wait for a lost rank is an error for some of them.
    let is_of_calls = match error {
        Error::Tensor(error) | Error::Comm(ddp_comm::Error::Tensor(error)) => {
            matches!(error, TensorError::Cuda(_) | TensorError::Capture(_))
        }
        Error::Comm(error) => matches!(error, Nccl(_) | Broken(_)),
        _ => false,
    };
    is_of_calls && world.ends_generation()
}

/// Ends this process if it has just joined and cannot train: its program, settings or data differ,
/// or it failed by itself. The other ranks continue. `joined` lists the ranks that joined since the
/// last step.
pub(crate) fn leave_if_new(error: &Error, world: &World, joined: &[usize]) {
    let is_new = joined.contains(&world.job_rank(world.rank()));
    let is_other = matches!(error, Error::Comm(ddp_comm::Error::Disagree(_)));
    let is_own = || error.reporter().is_none() && !continues_after(error, world, &[]);
    if is_new && (is_other || is_own()) {
        world.leave(error, error.exit_code());
    }
}

/// Ends this process after an error that no other rank need find: no memory, or data that this rank
/// cannot read. Rank 0 writes the run's folder: what is wrong there ends the job.
pub(crate) fn leave_if_alone(error: &Error, world: &World) {
    let is_own = match error.exit_code() {
        EXIT_MEMORY => true,
        EXIT_IO => world.rank() > 0,
        _ => false,
    };
    if is_own && error.reporter().is_none() && world.is_elastic() && world.size() > 1 {
        world.leave(error, error.exit_code());
    }
}

/// Refuses what does not survive the loss of a rank yet.
pub(crate) fn check(step: &Step, world: &World) -> Result<()> {
    let refuse = |text: &str| Err(Error::Usage(format!("{MIN_RANKS}: {text}")));
    if !world.is_elastic() {
        return Ok(());
    }
    for stage in step.stages() {
        let params = &stage.model().params;
        let is_on_gpu = params.device().is_accelerator();
        if is_on_gpu && step.stages().len() > 1 {
            return refuse(&format!(
                "expected {DEVICES_PER_RANK} 1 on GPUs, because the calls of several GPUs of a rank \
                 do not end together; help: leave out one of the two"
            ));
        }
        if params.buffers()?.is_some() {
            return refuse(
                "expected a model without buffers, because a step that is repeated would update \
                 them twice; help: use layers without running statistics",
            );
        }
    }
    Ok(())
}
