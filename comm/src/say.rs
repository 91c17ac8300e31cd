//! Lines on standard error, whatever state this process is in.

/// How long a line waits for a reader.
const WAIT_MS: i32 = 200;

/// Whether standard error takes a line, now or soon. A full pipe without a reader does not: a write
/// would block until somebody reads.
pub fn has_reader() -> bool {
    let mut stderr = libc::pollfd {
        fd: libc::STDERR_FILENO,
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: the call reads and writes the one struct that it is given.
    unsafe { libc::poll(&mut stderr, 1, WAIT_MS) != 0 }
}

/// Warns the program's user, even where the program shows no log.
pub(crate) fn warn(program: &str, text: &str) {
    match tracing::dispatcher::has_been_set() {
        true => tracing::warn!("{text}"),
        false => print_line(&format!("{program}: warning: {text}\n")),
    }
}

/// Writes `line` to standard error in one call, so that lines of ranks do not mix, and without its
/// lock, which a stuck thread may hold.
pub(crate) fn print_line(line: &str) {
    let mut left = line.as_bytes();
    while !left.is_empty() && has_reader() {
        // SAFETY: the call reads at most the length of the slice it is given.
        let written = unsafe { libc::write(libc::STDERR_FILENO, left.as_ptr().cast(), left.len()) };
        match usize::try_from(written) {
            Ok(0) => return,
            Ok(written) => left = &left[written..],
            Err(_) if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {
            }
            // The other end is closed.
            Err(_) => return,
        }
    }
}
