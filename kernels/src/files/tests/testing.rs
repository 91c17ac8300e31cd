//! A folder for one test, and disks that fail: also for the tests of crates above this one.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A disk that fails under one folder, until this is dropped. Tests run side by side: each has
/// a separate folder.
#[derive(Debug)]
pub struct Failing(PathBuf);

#[derive(Debug)]
struct Plan {
    under: PathBuf,
    calls: Vec<String>,
    fails_at: usize,
    is_last: bool,
}

static PLANS: Mutex<Vec<Plan>> = Mutex::new(Vec::new());

fn plans() -> MutexGuard<'static, Vec<Plan>> {
    PLANS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Failing {
    /// The call number `fails_at` under `under`, counted from 0, finds the disk full.
    /// `is_last`: so does every one after it, removals too, as if the process had been killed
    /// there.
    pub fn at(fails_at: usize, is_last: bool, under: &Path) -> Failing {
        plans().push(Plan {
            under: under.to_path_buf(),
            calls: Vec::new(),
            fails_at,
            is_last,
        });
        Failing(under.to_path_buf())
    }

    /// The calls so far: `write /tmp/…`.
    pub fn calls(&self) -> Vec<String> {
        plans()
            .iter()
            .find(|plan| plan.under == self.0)
            .map(|plan| plan.calls.clone())
            .unwrap_or_default()
    }
}

impl Drop for Failing {
    fn drop(&mut self) {
        plans().retain(|plan| plan.under != self.0);
    }
}

/// Whether the system may be asked for this change.
pub fn may(what: &'static str, path: &Path) -> io::Result<()> {
    let mut plans = plans();
    let Some(plan) = plans.iter_mut().find(|plan| path.starts_with(&plan.under)) else {
        return Ok(());
    };
    let number = plan.calls.len();
    // Files can be removed from a full disk.
    if what == "remove" && !plan.is_last {
        return Ok(());
    }
    plan.calls.push(format!("{what} {}", path.display()));
    let fails = if plan.is_last {
        number >= plan.fails_at
    } else {
        number == plan.fails_at
    };
    if fails {
        Err(io::ErrorKind::StorageFull.into())
    } else {
        Ok(())
    }
}

/// Removed with everything in it when the test ends.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Default for Scratch {
    fn default() -> Scratch {
        Scratch::new()
    }
}

impl Scratch {
    pub fn new() -> Scratch {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("ddp-test-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The names in the folder, sorted.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
