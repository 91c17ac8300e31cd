//! Kernels through the inner functions: compiled, loaded and run on a test's own memory.

mod bounds;
mod checks;
mod entry;
mod fences;
mod order;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::launch::KernelLaunch;
use super::library::Library;
use crate::error::CUresult;
use crate::nvrtc::{self, Program};
use crate::work::{Address, Failure, Memory, Touched, Work};

/// Device memory of a test, with unowned space around every allocation.
#[derive(Default)]
pub(super) struct Ground {
    live: Vec<(Range<Address>, Vec<u128>)>,
}

impl Memory for Ground {
    fn check(&self, device: usize, range: Range<Address>) -> Result<(), String> {
        let allocation = self.allocation(device, range.start)?;
        if range.end > allocation.end {
            Err("past the end".to_owned())
        } else {
            Ok(())
        }
    }

    fn allocation(&self, _device: usize, address: Address) -> Result<Range<Address>, String> {
        let found = self.live.iter().find(|(range, _)| range.contains(&address));
        found
            .map(|(range, _)| range.clone())
            .ok_or_else(|| "no allocation".to_owned())
    }

    fn host_pointer(&self, address: Address) -> *mut u8 {
        address as *mut u8
    }
}

impl Ground {
    const MARGIN_BYTES: u64 = 1024;

    /// An allocation of `bytes`, full of 0xFF.
    pub(super) fn allocate(&mut self, bytes: u64) -> Address {
        let units = (bytes + 2 * Self::MARGIN_BYTES).div_ceil(16) as usize;
        let mut backing = vec![u128::MAX; units];
        let start = (backing.as_mut_ptr() as u64 + Self::MARGIN_BYTES).next_multiple_of(256);
        self.live.push((start..start + bytes, backing));
        start
    }

    /// An allocation that holds `values`.
    pub(super) fn upload<T: Copy>(&mut self, values: &[T]) -> Address {
        let address = self.allocate(size_of_val(values) as u64);
        // SAFETY: the allocation was just made this large.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), address as *mut T, values.len()) };
        address
    }

    pub(super) fn download<T: Copy>(&self, address: Address, count: usize) -> Vec<T> {
        self.check(0, address..address + (count * size_of::<T>()) as u64)
            .unwrap();
        // SAFETY: just checked; any bits are values of the plain types that tests ask for.
        unsafe { std::slice::from_raw_parts(address as *const T, count) }.to_vec()
    }
}

/// Compiles a source and loads it.
pub(super) fn library(source: &str) -> Arc<Library> {
    library_with(&Program {
        name: "kernel.cu".to_owned(),
        source: source.to_owned(),
        ..Program::default()
    })
}

pub(super) fn library_with(program: &Program) -> Arc<Library> {
    let compiled = nvrtc::compile_now(
        program,
        &["--gpu-architecture=sm_90", "--fmad=false", "--std=c++17"],
    )
    .unwrap_or_else(|log| panic!("the kernel does not compile:\n{log}"));
    // SAFETY: the image is whole.
    Arc::new(unsafe { Library::load(compiled.cubin().as_ptr(), 90) }.expect("the image loads"))
}

/// A launch to be.
pub(super) struct Shot {
    pub(super) library: Arc<Library>,
    pub(super) name: &'static str,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) dynamic_shared_bytes: u32,
    pub(super) arguments: Vec<u64>,
    pub(super) seed: u64,
}

/// A launch in one dimension.
pub(super) fn shot(
    library: &Arc<Library>,
    name: &'static str,
    grid: u32,
    block: u32,
    arguments: &[u64],
) -> Shot {
    Shot {
        library: Arc::clone(library),
        name,
        grid: [grid, 1, 1],
        block: [block, 1, 1],
        dynamic_shared_bytes: 0,
        arguments: arguments.to_vec(),
        seed: 0,
    }
}

impl Shot {
    pub(super) fn dynamic(mut self, bytes: u32) -> Self {
        self.dynamic_shared_bytes = bytes;
        self
    }

    pub(super) fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    pub(super) fn run(self, ground: &Ground) -> Result<Touched, Failure> {
        let kernel = self
            .library
            .find(self.name)
            .expect("the kernel is exported and simulated");
        let sizes: Vec<u64> = kernel.parameters().collect();
        let given = self.arguments.len();
        assert_eq!(sizes.len(), given, "arguments of {}", self.name);
        let arguments = sizes.iter().zip(&self.arguments);
        let launch = KernelLaunch {
            kernel,
            grid: self.grid,
            block: self.block,
            dynamic_shared_bytes: self.dynamic_shared_bytes,
            arguments: arguments
                .map(|(bytes, value)| value.to_le_bytes()[..*bytes as usize].to_vec())
                .collect(),
            seed: self.seed,
            runs: AtomicU64::new(0),
        };
        let mut touched = Touched::default();
        launch.run(0, ground, &mut touched).map(|()| touched)
    }

    pub(super) fn expect(self, ground: &Ground) -> Touched {
        self.run(ground)
            .unwrap_or_else(|failure| panic!("{}", failure.message))
    }

    /// The message of a launch that must fail with `code` in any order.
    pub(super) fn expect_failure(self, ground: &Ground, code: CUresult) -> String {
        let failure = self.run(ground).expect_err("the launch succeeds");
        assert_eq!(failure.code, code, "{}", failure.message);
        failure.message
    }
}
