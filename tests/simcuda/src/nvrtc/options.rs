//! The options of nvrtcCompileProgram: which exist, and the meaning of those that matter here.

/// What the options ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Options {
    /// `compute_90`, which has PTX and no CUBIN, instead of `sm_90`.
    pub(super) is_virtual: bool,
    /// 90 for sm_90.
    pub(super) architecture: u32,
    /// The dialect for g++: `c++17`.
    pub(super) standard: String,
    pub(super) include_paths: Vec<String>,
    pub(super) pre_includes: Vec<String>,
    /// `-DNAME=VALUE` and `-UNAME`, in their order.
    pub(super) macros: Vec<String>,
    /// `a` or `f` of `sm_90a`, with features that later GPUs do not have; else empty.
    pub(super) suffix: String,
}

/// (long name, short name, whether it takes a value) of options without effect here: they choose
/// between equivalent codes or kinds of messages. `--fmad=true` allows contraction without
/// requiring it.
const WITHOUT_EFFECT: &[(&str, &str, bool)] = &[
    ("--device-c", "-dc", false),
    ("--device-w", "-dw", false),
    ("--relocatable-device-code", "-rdc", true),
    ("--extensible-whole-program", "-ewp", false),
    ("--device-debug", "-G", false),
    ("--generate-line-info", "-lineinfo", false),
    ("--dopt", "-dopt", true),
    ("--ptxas-options", "-Xptxas", true),
    ("--maxrregcount", "-maxrregcount", true),
    ("--ftz", "-ftz", true),
    ("--prec-sqrt", "-prec-sqrt", true),
    ("--prec-div", "-prec-div", true),
    ("--fmad", "-fmad", true),
    ("--use_fast_math", "-use_fast_math", false),
    (
        "--extra-device-vectorization",
        "-extra-device-vectorization",
        false,
    ),
    ("--modify-stack-limit", "-modify-stack-limit", true),
    ("--no-source-include", "-no-source-include", false),
    ("--builtin-move-forward", "-builtin-move-forward", true),
    (
        "--builtin-initializer-list",
        "-builtin-initializer-list",
        true,
    ),
    ("--disable-warnings", "-w", false),
    ("--restrict", "-restrict", false),
    (
        "--device-as-default-execution-space",
        "-default-device",
        false,
    ),
    ("--device-int128", "-device-int128", false),
    ("--optimization-info", "-opt-info", true),
    ("--display-error-number", "-err-no", false),
    ("--no-display-error-number", "-no-err-no", false),
    ("--diag-error", "-diag-error", true),
    ("--diag-suppress", "-diag-suppress", true),
    ("--diag-warn", "-diag-warn", true),
    ("--minimal", "-minimal", false),
    ("--split-compile", "-split-compile", true),
    ("--fdevice-syntax-only", "-fdevice-syntax-only", false),
    ("--version-ident", "-dQ", true),
    ("--time", "-time", true),
];

/// What NVRTC 13.0 compiles for.
pub(super) const ARCHITECTURES: &[u32] = &[75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];

impl Options {
    /// Reads options. The error is a log in NVRTC's words.
    pub(super) fn parse(given: &[String]) -> Result<Self, String> {
        let mut options = Self {
            is_virtual: true,
            architecture: 75,
            standard: "c++17".to_owned(),
            include_paths: Vec::new(),
            pre_includes: Vec::new(),
            macros: Vec::new(),
            suffix: String::new(),
        };
        let mut rest = given.iter().map(|option| option.trim());
        while let Some(option) = rest.next() {
            // `--name=value`; `-Dvalue`, `-Ivalue` and `-Uvalue` also without a sign or as two.
            let (name, value) = match option.split_once('=') {
                _ if ["-D", "-I", "-U"]
                    .iter()
                    .any(|short| option.starts_with(short)) =>
                {
                    (
                        &option[..2],
                        Some(option[2..].trim_start_matches('=').trim())
                            .filter(|value| !value.is_empty()),
                    )
                }
                Some((name, value)) => (name, Some(value)),
                None => (option, None),
            };
            let mut value = || {
                value
                    .or_else(|| rest.next())
                    .ok_or_else(|| format!("nvrtc: error: missing value for {name}\n"))
            };
            match name {
                "--gpu-architecture" | "-arch" => options.set_architecture(value()?)?,
                "--std" | "-std" => options.set_standard(value()?)?,
                "--include-path" | "-I" => options.include_paths.push(value()?.to_owned()),
                "--pre-include" | "-include" => options.pre_includes.push(value()?.to_owned()),
                "--define-macro" | "-D" => options.macros.push(format!("-D{}", value()?)),
                "--undefine-macro" | "-U" => options.macros.push(format!("-U{}", value()?)),
                _ => match WITHOUT_EFFECT
                    .iter()
                    .find(|(long, short, _)| name == *long || name == *short)
                {
                    Some((_, _, true)) => drop(value()?),
                    Some(_) if !option.contains('=') => {}
                    _ => {
                        return Err(format!(
                            "nvrtc: error: unrecognized option {option} found\n"
                        ));
                    }
                },
            }
        }
        Ok(options)
    }

    fn set_architecture(&mut self, value: &str) -> Result<(), String> {
        let (is_virtual, number) = match (value.strip_prefix("compute_"), value.strip_prefix("sm_"))
        {
            (Some(number), _) => (true, number),
            (_, Some(number)) => (false, number),
            _ => (false, ""),
        };
        let digits = number.trim_end_matches(['a', 'f']);
        self.suffix = number[digits.len()..].to_owned();
        let number: Option<u32> = digits.parse().ok();
        let Some(number) = number.filter(|number| ARCHITECTURES.contains(number)) else {
            return Err(format!(
                "nvrtc: error: invalid value for --gpu-architecture (-arch): {value}\n"
            ));
        };
        (self.is_virtual, self.architecture) = (is_virtual, number);
        Ok(())
    }

    fn set_standard(&mut self, value: &str) -> Result<(), String> {
        self.standard = match value {
            // The shim is C++17; what is older compiles as that.
            "c++03" | "c++11" | "c++14" | "c++17" => "c++17",
            "c++20" => "c++20",
            _ => {
                return Err(format!(
                    "nvrtc: error: invalid value for --std (-std): {value}\n"
                ));
            }
        }
        .to_owned();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(given: &[&str]) -> Result<Options, String> {
        Options::parse(
            &given
                .iter()
                .map(|option| (*option).to_owned())
                .collect::<Vec<_>>(),
        )
    }

    #[test]
    fn the_options_of_the_product_are_understood() {
        let options = parse(&[
            "--gpu-architecture=sm_90a",
            "--fmad=false",
            "--std=c++20",
            "-default-device",
            "--include-path=/cuda/include",
            "-I/other",
            "--define-macro=WIDTH=4",
            "-DEMPTY",
            "-D",
            "LAST=1",
        ])
        .unwrap();
        assert_eq!((options.architecture, options.is_virtual), (90, false));
        assert_eq!(options.suffix, "a");
        assert_eq!(options.standard, "c++20");
        assert_eq!(options.include_paths, ["/cuda/include", "/other"]);
        assert_eq!(options.macros, ["-DWIDTH=4", "-DEMPTY", "-DLAST=1"]);
    }

    #[test]
    fn unknown_options_and_values_are_refused_by_name() {
        for (option, named) in [
            ("--no-such-option", "--no-such-option"),
            ("-O3", "-O3"),
            ("--gpu-architecture=sm_42", "sm_42"),
            ("--gpu-architecture=", "architecture"),
            ("--std=c++98", "c++98"),
            ("--fmad", "missing value for --fmad"),
        ] {
            let log = parse(&[option]).expect_err(option);
            assert!(log.contains(named), "{option}: {log}");
        }
    }
}
