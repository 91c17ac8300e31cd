//! A second opinion on each launch: NVIDIA's PTX of the kernel, executed by `ddp-ptx` on a copy of
//! the memory before the library of the host runs. What both wrote must be the same, to the bit.
//!
//! With SIMCUDA_PTX_ERRORS=N approximate instructions err within the bounds of the ISA, by that
//! seed, and what the PTX wrote takes the place of the other: tests then show that their
//! tolerances hold. With 0 nothing errs.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use ddp_ptx::{Counts, Launch, Module, Overlay, Source};

use crate::error::CUresult;
use crate::work::{Address, Failure, Memory, Touched};

type Decoded = Arc<Result<ddp_ptx::Kernel, String>>;

/// The PTX of a library. Kernels are decoded when they are first launched.
#[derive(Debug)]
pub(super) struct Second {
    text: String,
    module: OnceLock<Result<Module, String>>,
    kernels: Mutex<HashMap<String, Decoded>>,
}

/// The memory of the device that a launch runs on.
struct Lent<'a> {
    device: usize,
    memory: &'a dyn Memory,
}

impl Source for Lent<'_> {
    fn allocation(&self, address: u64) -> Option<Range<u64>> {
        self.memory.allocation(self.device, address).ok()
    }

    fn read(&self, address: u64, to: &mut [u8]) {
        // SAFETY: the bytes are of an allocation, as the trait says, and nothing else runs on
        // devices meanwhile. A host that writes pinned memory at the same time gives old or new
        // bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.memory.host_pointer(address),
                to.as_mut_ptr(),
                to.len(),
            );
        }
    }
}

/// SIMCUDA_PTX_ERRORS.
pub(super) fn errors() -> Option<u64> {
    static SEED: OnceLock<Option<u64>> = OnceLock::new();
    *SEED.get_or_init(|| std::env::var("SIMCUDA_PTX_ERRORS").ok()?.parse().ok())
}

/// What the PTX did.
pub(super) struct Opinion {
    result: Result<Counts, String>,
    /// Allocations of the arguments, as they were.
    before: Vec<(Range<Address>, Vec<u8>)>,
    /// What it wrote, in stretches of up to 64 bytes.
    written: Vec<(Address, Vec<u8>)>,
    took: Duration,
    /// The time of its thread when it was there.
    ended: Duration,
}

/// How long the processor has worked for this thread.
fn thread_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is to a local variable.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

impl Second {
    pub(super) fn new(text: String) -> Second {
        Second {
            text,
            module: OnceLock::new(),
            kernels: Mutex::default(),
        }
    }

    fn kernel(&self, name: &str) -> Decoded {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let decode = || {
            let module = self
                .module
                .get_or_init(|| Module::parse(&self.text).map_err(|refusal| refusal.to_string()));
            let module = module.as_ref().map_err(String::clone)?;
            let kernel = module.kernel(name).ok_or("it has no such kernel")?;
            kernel.map_err(|refusal| refusal.to_string())
        };
        Arc::clone(
            kernels
                .entry(name.to_owned())
                .or_insert_with(|| Arc::new(decode())),
        )
    }

    /// Executes a launch.
    pub(super) fn execute(
        &self,
        name: &str,
        launch: &Launch,
        device: usize,
        memory: &dyn Memory,
    ) -> Opinion {
        let mut before: Vec<(Range<Address>, Vec<u8>)> = Vec::new();
        for argument in &launch.arguments {
            let Ok(address) = argument.as_slice().try_into().map(u64::from_le_bytes) else {
                continue;
            };
            if let Ok(range) = memory.allocation(device, address)
                && before.iter().all(|(known, _)| *known != range)
            {
                let bytes = copied(memory, &range);
                before.push((range, bytes));
            }
        }
        let start = thread_time();
        let kernel = self.kernel(name);
        let lent = Lent { device, memory };
        let mut overlay = Overlay::new(&lent);
        let result = match &*kernel {
            Ok(kernel) => kernel
                .run(launch, &mut overlay)
                .map_err(|finding| finding.to_string()),
            Err(refusal) => Err(format!("the PTX of {name} cannot be executed: {refusal}")),
        };
        let written = overlay.written();
        let written = written.map(|(at, bytes)| (at, bytes.to_vec())).collect();
        let ended = thread_time();
        Opinion {
            result,
            before,
            written,
            took: ended - start,
            ended,
        }
    }
}

/// The arguments of a launch, of these sizes and alignments, as the simulator keeps them.
pub(super) fn arguments(
    sizes: &[(usize, usize)],
    values: &[u128],
    offsets: &[usize],
) -> Vec<Vec<u8>> {
    let bytes_of = |((bytes, _), offset): (&(usize, usize), &usize)| {
        let words = &values[*offset..*offset + bytes.div_ceil(size_of::<u128>())];
        words
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .take(*bytes)
            .collect()
    };
    sizes.iter().zip(offsets).map(bytes_of).collect()
}

/// The bytes of memory that is allocated.
fn copied(memory: &dyn Memory, range: &Range<Address>) -> Vec<u8> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    // SAFETY: the callers' ranges are within allocations that live while a launch runs on them.
    unsafe {
        std::ptr::copy_nonoverlapping(
            memory.host_pointer(range.start),
            bytes.as_mut_ptr(),
            bytes.len(),
        );
    }
    bytes
}

/// The parts of a range that are in none of `spans`, which are sorted and apart.
fn missing(spans: &[Range<Address>], range: &Range<Address>) -> Vec<Range<Address>> {
    let (mut at, mut parts) = (range.start, Vec::new());
    let first = spans.partition_point(|span| span.end <= range.start);
    for span in spans[first..]
        .iter()
        .take_while(|span| span.start < range.end)
    {
        if at < span.start {
            parts.push(at..span.start);
        }
        at = at.max(span.end);
    }
    if at < range.end {
        parts.push(at..range.end);
    }
    parts
}

fn is_nan(bits: &[u8]) -> bool {
    match *bits {
        // A NaN of bf16 is one of f16, too.
        [low, high] => u16::from_le_bytes([low, high]) & 0x7fff > 0x7c00,
        [a, b, c, d] => f32::from_le_bytes([a, b, c, d]).is_nan(),
        _ => false,
    }
}

/// Whether both are the same numbers: of NaN the bits do not matter, which the ISA leaves open.
fn agree(ours: &[u8], theirs: &[u8], address: Address) -> bool {
    if ours == theirs {
        return true;
    }
    let halves = |bytes: &[u8], size: usize, at: usize| -> Option<Vec<u8>> {
        let start = (address as usize + at) / size * size;
        let start = start.checked_sub(address as usize)?;
        bytes.get(start..start + size).map(<[u8]>::to_vec)
    };
    (0..ours.len())
        .filter(|at| ours[*at] != theirs[*at])
        .all(|at| {
            [2, 4].into_iter().any(|size| {
                match (halves(ours, size, at), halves(theirs, size, at)) {
                    (Some(ours), Some(theirs)) => is_nan(&ours) && is_nan(&theirs),
                    _ => false,
                }
            })
        })
}

impl Opinion {
    /// Compares what the library of the host wrote, which is in memory now.
    pub(super) fn compare(
        &self,
        what: &str,
        kernel: &str,
        memory: &dyn Memory,
        touched: &Touched,
    ) -> Option<Failure> {
        let of_library = thread_time() - self.ended;
        let message = match &self.result {
            Err(message) => Some(message.clone()),
            Ok(_) if errors().is_some() => {
                self.apply(memory);
                None
            }
            Ok(_) => self.difference(memory, touched),
        };
        self.note(kernel, message.is_none(), of_library);
        message.map(|message| Failure {
            code: CUresult::CUDA_ERROR_LAUNCH_FAILED,
            message: format!("{what}: NVIDIA's PTX says otherwise: {message}"),
        })
    }

    /// Puts what the PTX wrote in memory.
    fn apply(&self, memory: &dyn Memory) {
        for (at, bytes) in &self.written {
            // SAFETY: an allocation that the PTX wrote to, and that is still there. The launch
            // owns what it writes until it is over.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    bytes.as_ptr(),
                    memory.host_pointer(*at),
                    bytes.len(),
                );
            }
        }
    }

    fn difference(&self, memory: &dyn Memory, touched: &Touched) -> Option<String> {
        let mut text = String::new();
        let mut count = 0;
        for (at, theirs) in &self.written {
            let ours = copied(memory, &(*at..*at + theirs.len() as u64));
            if !agree(&ours, theirs, *at) {
                count += 1;
                if count <= 4 {
                    let place = memory.describe(&(*at..*at + theirs.len() as u64));
                    let _ = write!(
                        text,
                        "\n  {place}\n    g++: {ours:02x?}\n    PTX: {theirs:02x?}"
                    );
                }
            }
        }
        if count > 0 {
            return Some(format!("{count} stretches of up to 64 bytes differ:{text}"));
        }
        // What only the library wrote.
        let mut spans: Vec<Range<Address>> = self
            .written
            .iter()
            .map(|(at, bytes)| *at..*at + bytes.len() as u64)
            .collect();
        spans.sort_by_key(|span| span.start);
        let mut whole: Vec<Range<Address>> = Vec::new();
        for span in spans {
            match whole.last_mut() {
                Some(last) if last.end >= span.start => last.end = last.end.max(span.end),
                _ => whole.push(span),
            }
        }
        let ours = touched.writes.iter().chain(&touched.atomics);
        ours.flat_map(|range| missing(&whole, range))
            .find(|part| !self.is_as_before(part, memory))
            .map(|part| format!("it does not write {}", memory.describe(&part)))
    }

    /// Whether bytes are what they were before the launch: the compiler leaves out a store of what
    /// it has just loaded.
    fn is_as_before(&self, part: &Range<Address>, memory: &dyn Memory) -> bool {
        let holds = |(range, _): &&(Range<Address>, Vec<u8>)| {
            range.start <= part.start && part.end <= range.end
        };
        self.before
            .iter()
            .find(holds)
            .is_some_and(|(range, bytes)| {
                let (start, end) = (part.start - range.start, part.end - range.start);
                bytes[start as usize..end as usize] == copied(memory, part)
            })
    }

    /// A line in the file that SIMCUDA_PTX_REPORT names.
    fn note(&self, kernel: &str, agrees: bool, of_library: Duration) {
        let Some(path) = std::env::var_os("SIMCUDA_PTX_REPORT") else {
            return;
        };
        let counts = self.result.as_ref().copied().unwrap_or_default();
        let bytes: usize = self.written.iter().map(|(_, bytes)| bytes.len()).sum();
        let line = format!(
            "{kernel}\t{}\t{}\t{}\t{}\t{bytes}\t{}\n",
            if agrees { "agrees" } else { "differs" },
            counts.instructions,
            counts.thread_instructions,
            self.took.as_nanos(),
            of_library.as_nanos(),
        );
        let file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path);
        if let Err(error) =
            file.and_then(|mut file| std::io::Write::write_all(&mut file, line.as_bytes()))
        {
            eprintln!("simcuda: SIMCUDA_PTX_REPORT={}: {error}", path.display());
        }
    }
}
