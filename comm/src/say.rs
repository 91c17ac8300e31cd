//! Lines on standard error, whatever state this process is in. A full pipe that nobody reads, or a
//! suspended terminal, blocks no thread: what does not fit is dropped, and the next line says so.

use std::ffi::{CStr, c_int};
use std::io::{self, Error, ErrorKind};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// How long a line waits for a reader.
const WAIT: Duration = Duration::from_millis(200);

static STDERR: LineOutput = LineOutput {
    number: libc::STDERR_FILENO,
    path: c"/proc/self/fd/2",
    dropped: AtomicUsize::new(0),
};

/// Where lines go.
struct LineOutput {
    number: c_int,
    path: &'static CStr,
    /// How many lines did not fit since the last one that did.
    dropped: AtomicUsize,
}

/// Warns the program's user, even if the program shows no log.
pub(crate) fn warn(program: &str, text: &str) {
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{text}");
    } else {
        print_line(&format!("{program}: warning: {text}\n"));
    }
}

/// Writes `line` to standard error in one call, so that lines of ranks do not mix, and without its
/// lock, which a stuck thread may hold.
pub fn print_line(line: &str) {
    STDERR.print(line, WAIT);
}

/// As `print_line`, for lines of which there may be many: while none is read, they do not wait.
pub fn print_progress(line: &str) {
    STDERR.print_progress(line);
}

/// Writes to standard error what it takes now. Safe in a handler of signals.
pub fn print_now(bytes: &[u8]) {
    if STDERR.has_room(Duration::ZERO) {
        _ = STDERR.write(bytes);
    }
}

impl LineOutput {
    fn print(&self, line: &str, wait: Duration) {
        let (dropped, until) = (self.dropped.swap(0, Relaxed), Instant::now() + wait);
        let note = match dropped {
            0 => String::new(),
            count => format!("(lines not printed, because standard error was full: {count})\n"),
        };
        let text = note + line;
        let mut left = text.as_bytes();
        while !left.is_empty() {
            let wait = until.saturating_duration_since(Instant::now());
            let written = if self.has_room(wait) {
                self.write(left)
            } else {
                Err(ErrorKind::TimedOut.into())
            };
            use ErrorKind::{Interrupted, TimedOut, WouldBlock};
            match written.map_err(|error| error.kind()) {
                Ok(count @ 1..) => left = &left[count..],
                Err(Interrupted | WouldBlock) if !wait.is_zero() => {}
                Err(Interrupted | WouldBlock | TimedOut) => {
                    self.dropped.fetch_add(dropped + 1, Relaxed);
                    return;
                }
                // The other end is closed.
                _ => return,
            }
        }
    }

    fn print_progress(&self, line: &str) {
        let was_read = self.dropped.load(Relaxed) == 0;
        self.print(line, if was_read { WAIT } else { Duration::ZERO });
    }

    /// Whether it takes something within `wait`.
    fn has_room(&self, wait: Duration) -> bool {
        let mut output = libc::pollfd {
            fd: self.number,
            events: libc::POLLOUT,
            revents: 0,
        };
        // SAFETY: the call reads and writes the one struct that it is given.
        unsafe { libc::poll(&mut output, 1, wait.as_millis() as c_int) != 0 }
    }

    /// Writes what fits at once. Another process may have filled a pipe since `has_room`.
    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let (from, count) = (bytes.as_ptr().cast(), bytes.len());
        let mut about = MaybeUninit::<libc::stat>::zeroed();
        let flags = libc::O_WRONLY | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
        // SAFETY: the calls read a string that ends with 0 and at most the slice's length, and
        // write the one struct; what is opened here is closed here.
        unsafe {
            // The flag belongs to whatever shares an open pipe or terminal: this is another one.
            let own = libc::open(self.path.as_ptr(), flags);
            let is_known = own >= 0 && libc::fstat(own, about.as_mut_ptr()) == 0;
            let kind = about.assume_init().st_mode & libc::S_IFMT;
            let mut written = if is_known && [libc::S_IFIFO, libc::S_IFCHR].contains(&kind) {
                libc::write(own, from, count)
            } else {
                let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
                libc::send(self.number, from, count, flags)
            };
            if written < 0 && Error::last_os_error().raw_os_error() == Some(libc::ENOTSOCK) {
                written = libc::write(self.number, from, count);
            }
            let error = Error::last_os_error();
            if own >= 0 {
                libc::close(own);
            }
            usize::try_from(written).map_err(|_| error)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs::File;
    use std::io::{PipeReader, PipeWriter, Read, pipe};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn output(of: &impl AsRawFd) -> LineOutput {
        let path = CString::new(format!("/proc/self/fd/{}", of.as_raw_fd())).unwrap();
        LineOutput {
            number: of.as_raw_fd(),
            path: Box::leak(path.into_boxed_c_str()),
            dropped: AtomicUsize::new(0),
        }
    }

    /// The ends of a pipe with room for 4096 bytes.
    fn page() -> (PipeReader, PipeWriter) {
        let (reader, writer) = pipe().unwrap();
        // SAFETY: sets the size of a pipe of this process.
        unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) };
        (reader, writer)
    }

    #[test]
    fn lines_that_nothing_reads_are_dropped_and_counted_and_the_pipe_stays_as_it_is() {
        let (mut reader, writer) = page();
        let output = output(&writer);
        output.print_progress(&"x".repeat(4096));
        // If each waited, they would take 200 s.
        let began = Instant::now();
        (0..1000).for_each(|_| output.print_progress("step\n"));
        assert!(began.elapsed() < Duration::from_secs(100));
        assert_eq!(output.dropped.load(Relaxed), 1000);

        let mut read = [0; 4096];
        reader.read_exact(&mut read).unwrap();
        output.print_progress("step\n");
        drop(writer);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        let note = "(lines not printed, because standard error was full: 1000)";
        assert_eq!(rest, format!("{note}\nstep\n"));
    }

    #[test]
    fn a_line_that_is_longer_than_the_room_does_not_wait_for_a_reader() {
        let (_reader, writer) = page();
        let ours = output(&writer);
        // A write that waits would not return.
        ours.print(&"x".repeat(10_000), WAIT);
        assert_eq!(ours.dropped.load(Relaxed), 1);
        let (_reader, writer) = UnixStream::pair().unwrap();
        let ours = output(&writer);
        ours.print(&"x".repeat(10_000_000), WAIT);
        assert_eq!(ours.dropped.load(Relaxed), 1);
    }

    #[test]
    fn files_and_sockets_get_whole_lines_in_order() {
        let (mut reader, writer) = UnixStream::pair().unwrap();
        let path = std::env::temp_dir().join(format!("ddp-say-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        for output in [output(&writer), output(&file)] {
            output.print("one\n", WAIT);
            output.print_progress("two\n");
        }
        drop(writer);
        let mut read = String::new();
        reader.read_to_string(&mut read).unwrap();
        assert_eq!(read, "one\ntwo\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), read);
        std::fs::remove_file(path).unwrap();
    }
}
