//! The options of nvrtcCompileProgram: what matters here. NVRTC itself checks all of them.

/// What NVRTC is called with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Options {
    /// `compute_90`, or no architecture at all, for which there is PTX and no CUBIN; not `sm_90`.
    pub(super) is_virtual: bool,
    /// The options as given, but for a virtual architecture, of which PTX is made, and with lines.
    pub(super) real: Vec<String>,
}

/// What NVRTC 13.0 compiles for.
pub(super) const ARCHITECTURES: &[u32] = &[75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];

/// Options that make files a part of the program.
const OPEN: [&str; 4] = ["--include-path", "-I", "--pre-include", "-include"];

impl Options {
    pub(super) fn new(given: &[String]) -> Self {
        let (mut is_virtual, mut has_lines, mut real) = (true, false, Vec::new());
        let mut is_architecture = false;
        for option in given.iter().map(|option| option.trim()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            let names = matches!(name, "--gpu-architecture" | "-arch");
            has_lines |= matches!(name, "--generate-line-info" | "-lineinfo");
            // `sm_90` may also be a separate argument, after `--gpu-architecture`.
            let value = if is_architecture { option } else { value };
            if (names || is_architecture) && value.starts_with("sm_") {
                is_virtual = false;
                real.push(option.replacen("sm_", "compute_", 1));
            } else {
                real.push(option.to_owned());
            }
            is_architecture = names && !option.contains('=');
        }
        if !has_lines {
            real.push("-lineinfo".to_owned());
        }
        Self { is_virtual, real }
    }

    /// Whether the texts that a program was made of are all of it.
    pub(super) fn is_closed(&self) -> bool {
        let opens = |option: &String| OPEN.iter().any(|open| option.starts_with(open));
        !self.real.iter().any(opens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(given: &[&str]) -> Options {
        let given: Vec<String> = given.iter().map(|option| (*option).to_owned()).collect();
        Options::new(&given)
    }

    #[test]
    fn ptx_is_made_for_the_architecture_and_with_lines() {
        let made = options(&["--gpu-architecture=sm_90a", "--fmad=false"]);
        let real = [
            "--gpu-architecture=compute_90a",
            "--fmad=false",
            "-lineinfo",
        ];
        assert_eq!(
            (made.is_virtual, &made.real[..]),
            (false, &real.map(str::to_owned)[..])
        );
        let made = options(&["-arch", "sm_80", "-lineinfo"]);
        let real = ["-arch", "compute_80", "-lineinfo"];
        assert_eq!(
            (made.is_virtual, &made.real[..]),
            (false, &real.map(str::to_owned)[..])
        );
        assert!(options(&["--gpu-architecture=compute_90"]).is_virtual);
        assert!(options(&[]).is_virtual);
    }

    #[test]
    fn files_of_include_paths_are_a_part_of_the_program() {
        assert!(options(&["-DI=1", "--std=c++17"]).is_closed());
        for open in ["-I/cuda", "--include-path=/cuda", "--pre-include=a.h"] {
            assert!(!options(&[open]).is_closed(), "{open}");
        }
    }
}
