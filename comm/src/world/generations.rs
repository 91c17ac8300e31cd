//! The worlds of an elastic job, one for each generation.

use std::fmt::Display;

use ddp_kernels::panics;

use super::World;
use crate::error::{Error, Result};
use crate::membership::Change;
use crate::transport::failure::GRACE;
use crate::world::allocation;

impl World {
    /// Whether the job is elastic: it continues without lost ranks.
    pub fn is_elastic(&self) -> bool {
        self.elastic.is_some()
    }

    /// Whether this process joins a job that runs already. It is alone until `next_generation`.
    pub fn is_newcomer(&self) -> bool {
        self.elastic.as_ref().is_some_and(|it| it.number == 0)
    }

    /// How often the ranks have met: 1 at the start. 0 for a newcomer.
    pub fn generation(&self) -> u64 {
        self.elastic.as_ref().map_or(1, |it| u64::from(it.number))
    }

    /// Who was lost and who came since the generation before.
    pub fn change(&self) -> Change {
        let elastic = self.elastic.as_ref();
        elastic.map(|it| it.change.clone()).unwrap_or_default()
    }

    /// A rank's number in the job, which is the same in all generations.
    pub fn job_rank(&self, rank: usize) -> usize {
        let elastic = self.elastic.as_ref();
        let job_rank = elastic.and_then(|it| it.job_ranks.get(rank).copied());
        job_rank.unwrap_or(rank)
    }

    /// The most ranks that any of its generations can have.
    pub fn ranks_max(&self) -> usize {
        let elastic = self.elastic.as_ref();
        elastic.map_or(self.size(), |it| it.client.ranks())
    }

    /// With fewer ranks the job saves and ends.
    pub fn min_ranks(&self) -> usize {
        let elastic = self.elastic.as_ref();
        elastic.map_or(1, |it| it.client.heard().min_ranks)
    }

    /// Whether a process waits to be taken in. Ranks may see it at different times.
    pub fn has_newcomers(&self) -> bool {
        let elastic = self.elastic.as_ref();
        elastic.is_some_and(|it| it.number > 0 && it.client.heard().newcomers)
    }

    /// Ends all calls of this world's groups. On GPUs they end soon, without a result, and their
    /// graphs have to be destroyed before `next_generation`. A rank that made another one wait too
    /// long (`why`) is killed.
    pub fn end_generation(&self, why: Option<&Error>) {
        panics::lock(&self.made).clear();
        match why {
            Some(error @ Error::Timeout { missing, .. }) => self.failure.lose(error, missing),
            Some(error @ Error::Nccl(_)) => self.failure.lose(error, &[]),
            _ => _ = self.failure.end_generation("the ranks meet again".into()),
        }
    }

    /// Whether this generation ends, or does so soon: another rank may not have been missed yet.
    pub fn ends_generation(&self) -> bool {
        let cause = self.failure.board.wait_for_abort(GRACE);
        cause.is_some_and(|cause| cause.ends_generation())
    }

    /// The job's work is done: losing a rank changes nothing from now on.
    pub fn finish(&self) {
        self.elastic.iter().for_each(|it| _ = it.client.end(0));
    }

    /// Ends this process because it cannot continue, for example because its GPU has failed. The
    /// other ranks continue. After an exit code of 78 it is not started again.
    pub fn leave(&self, error: &dyn Display, exit_code: u8) -> ! {
        self.failure.leave(&error.to_string(), exit_code)
    }

    /// Meets the ranks that are left and those that came, after [`Error::is_rank_lost`], after
    /// `why`, a call that timed out, or because all ranks have agreed to. All groups of this world
    /// are useless from now on. Ranks are numbered anew, in the order of their numbers in the job.
    /// A rank that makes no progress is killed.
    ///
    /// If the job ends meanwhile, this ends the process.
    pub fn next_generation(&self, why: Option<&Error>) -> Result<World> {
        let Some(elastic) = &self.elastic else {
            let help = "start the job with the fewest ranks with which it may continue";
            let reason = "this job ends when a rank is lost";
            return Err(Error::setup("meet again", reason, help));
        };
        self.end_generation(why);
        self.gpu_watches.stop();
        let (start, elastic) = elastic.next()?;
        let world = World::of_generation(start, elastic)?;
        world.install_panic_hook();
        allocation::report_failures_to(&world.failure);
        world.watch()?;
        Ok(world)
    }
}
