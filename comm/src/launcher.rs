//! What started this process: the environment variables by which launchers and schedulers tell a process who it is.
//!
//! Pure functions over a lookup of variables. MPI is initialised only where an MPI launcher's variables are present, for
//! that takes 0.3 s; and a process that is alone although several were started is told so.

#![cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "only MPI brings processes together"))]

use std::fmt;

/// A lookup of environment variables.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Who started this process as one of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Launcher {
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpiexec` of MPICH or Intel MPI (Hydra), or another that speaks PMI: `srun --mpi=pmi2`.
    Pmi,
    /// Another that speaks PMIx: `srun --mpi=pmix`, PRRTE.
    Pmix,
}

/// What the launcher said. A number it did not give is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    pub(crate) launcher: Launcher,
    pub(crate) size: Option<usize>,
    /// Ranks on this host.
    pub(crate) local_size: Option<usize>,
}

/// The rank that the launcher's variables give this process, 0 without any: for what comes before `World::connect`, as who
/// logs. `World::rank` is the one to rely on.
pub fn likely_rank() -> usize {
    let number = |name: &str| std::env::var(name).ok()?.trim().parse::<usize>().ok();
    ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"].into_iter().find_map(number).unwrap_or(0)
}

impl Launch {
    /// The launch this process is part of; none if no MPI launcher started it.
    pub(crate) fn detect(lookup: Lookup<'_>) -> Option<Launch> {
        let number = |name: &str| lookup(name)?.trim().parse::<usize>().ok();
        let open_mpi = number("OMPI_COMM_WORLD_RANK").map(|_| Launch {
            launcher: Launcher::OpenMpi,
            size: number("OMPI_COMM_WORLD_SIZE"),
            local_size: number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        });
        let pmi = || {
            number("PMI_RANK").map(|_| Launch {
                launcher: Launcher::Pmi,
                size: number("PMI_SIZE"),
                local_size: number("MPI_LOCALNRANKS"),
            })
        };
        // PMIx gives the size by its protocol alone.
        let pmix = || number("PMIX_RANK").map(|_| Launch { launcher: Launcher::Pmix, size: None, local_size: None });
        open_mpi.or_else(pmi).or_else(pmix)
    }

    /// Whether there is nobody to come together with.
    pub(crate) fn is_of_one(&self) -> bool {
        self.size == Some(1)
    }

    /// Whether all ranks are known to be on this host.
    pub(crate) fn is_on_one_host(&self) -> bool {
        self.size.is_some() && self.size == self.local_size
    }

    /// How to let a rank run on all cores it may share.
    pub(crate) fn unbind(&self, lookup: Lookup<'_>) -> &'static str {
        match self.launcher {
            _ if lookup("SLURM_STEP_ID").is_some() => "srun --cpu-bind=none, or more cores a task with --cpus-per-task",
            Launcher::OpenMpi | Launcher::Pmix => "mpirun --bind-to none",
            Launcher::Pmi => "mpiexec -bind-to none (Intel MPI: I_MPI_PIN=0)",
        }
    }
}

/// Several processes that something claims to have started.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Claim {
    by: By,
    variable: &'static str,
    count: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    MpiLauncher,
    Slurm,
    Pbs,
    Torchrun,
}

impl fmt::Display for By {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            By::MpiLauncher => "the MPI launcher",
            By::Slurm => "Slurm",
            By::Pbs => "PBS",
            By::Torchrun => "torchrun, or what sets its variables,",
        })
    }
}

/// The first claim of more than one process.
fn claim(lookup: Lookup<'_>) -> Option<Claim> {
    let several = |by, variable: &'static str| {
        let count = lookup(variable)?.trim().parse::<usize>().ok()?;
        (count > 1).then_some(Claim { by, variable, count })
    };
    // A step's own count says more than that of the allocation around it: `srun -n 1` in a job of four is meant.
    let slurm = match lookup("SLURM_STEP_NUM_TASKS") {
        Some(_) => "SLURM_STEP_NUM_TASKS",
        None => "SLURM_NTASKS",
    };
    several(By::MpiLauncher, "OMPI_COMM_WORLD_SIZE")
        .or_else(|| several(By::MpiLauncher, "PMI_SIZE"))
        .or_else(|| several(By::Slurm, slurm))
        .or_else(|| several(By::Pbs, "PBS_NP"))
        .or_else(|| several(By::Torchrun, "WORLD_SIZE"))
}

/// What to tell a process that is a world of one although several were started: which bootstrap is missing, and what to
/// type. None where being alone is what was asked for. `with_mpi`: this build can use MPI; `mpi_started`: it did.
pub(crate) fn alone_warning(lookup: Lookup<'_>, with_mpi: bool, mpi_started: bool) -> Option<String> {
    let Claim { by, variable, count } = claim(lookup)?;
    // Within an allocation of four, `mpirun -n 1` is meant.
    if matches!(by, By::Slurm | By::Pbs) && Launch::detect(lookup).is_some_and(|launch| launch.is_of_one()) {
        return None;
    }
    let way_out = if !with_mpi {
        format!(
            "This program was built without the feature mpi: build it with default features on a machine that has \
             MPI, and start it with mpirun -n {count}."
        )
    } else {
        match by {
            By::MpiLauncher => "The launcher and the MPI library of this program do not belong together: use the \
                mpirun of the MPI that the program was built with (ldd shows which libmpi it loads)."
                .to_string(),
            By::Slurm if mpi_started => "Slurm's PMI and the MPI library of this program do not understand each \
                other: try srun --mpi=pmix, or mpirun inside the allocation."
                .to_string(),
            By::Slurm => format!(
                "Slurm gave no PMI: start it with srun --mpi=pmix (srun --mpi=list shows what there is), or with \
                 mpirun -n {count} inside the allocation."
            ),
            By::Pbs => format!("If {count} ranks are meant, start it with mpirun -n {count}."),
            By::Torchrun => format!("Start it with mpirun -n {count} instead."),
        }
    };
    Some(format!(
        "this process is alone, but {by} speaks of {count} tasks ({variable}={count}): {count} such processes would \
         each train by themselves and write the same files. {way_out}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(pairs: &'static [(&'static str, &'static str)]) -> impl Fn(&str) -> Option<String> {
        move |name| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string())
    }

    fn detect(pairs: &'static [(&'static str, &'static str)]) -> Option<Launch> {
        Launch::detect(&variables(pairs))
    }

    fn warning(pairs: &'static [(&'static str, &'static str)], with_mpi: bool, mpi_started: bool) -> Option<String> {
        alone_warning(&variables(pairs), with_mpi, mpi_started)
    }

    #[test]
    fn each_launcher_is_known_by_its_variables() {
        let open_mpi = detect(&[
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_RANK", "3"),
        ]);
        let expected = Launch { launcher: Launcher::OpenMpi, size: Some(4), local_size: Some(2) };
        assert_eq!(open_mpi, Some(expected));
        assert!(!expected.is_on_one_host());

        let hydra = detect(&[("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("MPI_LOCALNRANKS", "2")]).unwrap();
        assert_eq!(hydra, Launch { launcher: Launcher::Pmi, size: Some(2), local_size: Some(2) });
        assert!(hydra.is_on_one_host());

        let slurm = detect(&[("PMIX_RANK", "1"), ("SLURM_NTASKS", "2")]).unwrap();
        assert_eq!(slurm, Launch { launcher: Launcher::Pmix, size: None, local_size: None });
        assert!(!slurm.is_on_one_host() && !slurm.is_of_one());
    }

    #[test]
    fn a_scheduler_without_pmi_and_nonsense_start_no_mpi() {
        assert_eq!(detect(&[]), None);
        assert_eq!(detect(&[("SLURM_NTASKS", "8"), ("SLURM_PROCID", "3")]), None);
        assert_eq!(detect(&[("WORLD_SIZE", "8"), ("RANK", "3")]), None);
        assert_eq!(detect(&[("OMPI_COMM_WORLD_RANK", "first")]), None);
    }

    #[test]
    fn mpirun_of_one_has_nobody_to_meet() {
        assert!(detect(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")]).unwrap().is_of_one());
    }

    #[test]
    fn several_tasks_and_a_world_of_one_say_what_to_type() {
        let slurm = warning(&[("SLURM_NTASKS", "4")], true, false).unwrap();
        assert!(slurm.contains("Slurm speaks of 4 tasks (SLURM_NTASKS=4)"), "{slurm}");
        assert!(slurm.contains("srun --mpi=pmix") && slurm.contains("mpirun -n 4"), "{slurm}");

        let strangers = warning(&[("PMIX_RANK", "0"), ("SLURM_NTASKS", "4")], true, true).unwrap();
        assert!(strangers.contains("do not understand each other"), "{strangers}");

        let torchrun = warning(&[("WORLD_SIZE", "2")], true, false).unwrap();
        assert!(torchrun.contains("mpirun -n 2 instead"), "{torchrun}");

        let other_mpi = warning(&[("OMPI_COMM_WORLD_SIZE", "2")], true, true).unwrap();
        assert!(other_mpi.contains("do not belong together"), "{other_mpi}");

        assert!(warning(&[("PBS_NP", "16")], true, false).unwrap().contains("If 16 ranks are meant"));
    }

    #[test]
    fn a_build_without_mpi_says_so_under_every_launcher() {
        for pairs in [&[("OMPI_COMM_WORLD_SIZE", "2")], &[("PMI_SIZE", "2")], &[("SLURM_NTASKS", "2")]] {
            assert!(warning(pairs, false, false).unwrap().contains("without the feature mpi"));
        }
    }

    #[test]
    fn one_task_is_no_reason_to_warn() {
        assert_eq!(warning(&[], true, false), None);
        assert_eq!(warning(&[("SLURM_NTASKS", "1"), ("WORLD_SIZE", "1")], true, false), None);
        // mpirun of one inside an allocation of four, with MPI built in or not; but torchrun is a launcher of its own.
        let mpirun_of_one = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")];
        for (allocation, is_warned) in [("SLURM_NTASKS", false), ("PBS_NP", false), ("WORLD_SIZE", true)] {
            let mut lookup = std::collections::HashMap::from(mpirun_of_one);
            lookup.insert(allocation, "4");
            let lookup = |name: &str| lookup.get(name).map(ToString::to_string);
            for with_mpi in [true, false] {
                assert_eq!(alone_warning(&lookup, with_mpi, false).is_some(), is_warned, "{allocation}");
            }
        }
        // One step of one task inside an allocation of four.
        assert_eq!(warning(&[("SLURM_NTASKS", "4"), ("SLURM_STEP_NUM_TASKS", "1")], true, false), None);
    }

    #[test]
    fn the_way_to_unbind_is_that_of_the_launcher() {
        let launch = |launcher| Launch { launcher, size: Some(2), local_size: Some(2) };
        assert!(launch(Launcher::OpenMpi).unbind(&variables(&[])).contains("--bind-to none"));
        assert!(launch(Launcher::Pmi).unbind(&variables(&[])).contains("-bind-to none"));
        assert!(launch(Launcher::Pmix).unbind(&variables(&[("SLURM_STEP_ID", "0")])).contains("srun --cpu-bind=none"));
    }
}
