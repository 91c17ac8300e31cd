//! How a process becomes a rank: by what started it.

use super::options::Options;
use super::{World, bootstrap, generations};
use crate::error::Result;
use crate::launch::cores::{self, CoreShare};
use crate::launch::stop;
use crate::launcher::{self, Launch, OwnJob};
use crate::membership::client::Client;
use crate::say;
use crate::transport::nccl::environment::{self, RankKind};

impl World {
    /// Brings the ranks of this job together. A process that no launcher started, or that was
    /// started alone, is a world of one; it is warned if a scheduler started several like it.
    ///
    /// Call it first in `main`, before there are other threads: only then may it change the
    /// environment, with which Open MPI on one host avoids the network and /dev/shm. From then on
    /// SIGXFSZ is ignored: a file beyond its limit is an error of the call that writes. Signals
    /// that ask to stop, which the launcher and [`crate::hold_stops`] block, are unblocked.
    ///
    /// If all ranks find an error, rank 0 returns it, and the others [`crate::Error::PeerFailed`],
    /// which need not be printed.
    pub fn connect(options: &Options) -> Result<World> {
        stop::ignore_file_limit();
        stop::hear();
        let lookup = |name: &str| std::env::var(name).ok();
        let launch = Launch::detect(&lookup)?;
        if let Some(job) = OwnJob::read(&lookup)? {
            let client = Client::new(job.rank, bootstrap::inherited(job.socket)?)?;
            client.tell_at_once();
            if client.heard().is_elastic {
                let (start, elastic) = generations::connect(options, client)?;
                let Some(start) = start else {
                    let mut world = World::alone(options, vec![job.rank])?;
                    world.elastic = Some(elastic);
                    return Ok(world);
                };
                let world = World::of_generation(start, elastic)?;
                world.warn_of_narrow_cores();
                return Ok(world);
            }
            if job.size > 1 {
                return World::of_processes(generations::connect_once(options, &client)?, options);
            }
        }
        let mpi_started = match launch.filter(|launch| !launch.is_of_one()) {
            Some(launch) => match bootstrap::connect(options, &launch)? {
                Some(start) => return World::of_processes(start, options),
                None => true,
            },
            None => false,
        };
        let with_mpi = cfg!(feature = "mpi");
        let alone = launcher::check_alone(&lookup, with_mpi, mpi_started);
        if let Some(warning) = alone.map_err(launcher::of_all_ranks)? {
            say::warn(&options.program, &warning);
        }
        environment::apply(environment::settings(
            RankKind::Alone,
            options.nccl,
            &lookup,
        ));
        let mut world = World::alone(options, Vec::new())?;
        if let Some(launch) = launch {
            world.cores = CoreShare::new(&[cores::own_cores()], 0, cores::launcher_cores());
            world.unbind = launch.launcher.unbind(&lookup);
        }
        world.warn_of_narrow_cores();
        Ok(world)
    }
}
