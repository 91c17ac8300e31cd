//! Copies to shared memory that a thread starts and waits for, and matrices that a warp loads.

use super::{Ground, library, shot};
use crate::error::CUresult;

const FAILED: CUresult = CUresult::CUDA_ERROR_LAUNCH_FAILED;

/// Each thread copies 16 bytes in each of two groups, `WAITED` waits for all but this many groups,
/// and `BETWEEN` stands between that and the use.
const SOURCE: &str = r#"
struct Words { unsigned int at[4]; };
extern "C" __global__ void copies(const Words* x, unsigned int* y) {
  __shared__ __align__(16) Words tile[2][64];
  unsigned int t = threadIdx.x;
  for (unsigned int i = 0; i < 2; i++) {
    unsigned int to = (unsigned int)__cvta_generic_to_shared(&tile[i][t]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(x + i * 64 + t), "r"(t == 5 ? 8 : 16) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  WAITED
  BETWEEN
  y[t] = tile[USED][t ^ OTHER].at[3];
}"#;

fn run(waited: &str, between: &str, used: &str, other: &str) -> Result<Vec<u32>, String> {
    let source = SOURCE
        .replace("WAITED", waited)
        .replace("BETWEEN", between)
        .replace("USED", used)
        .replace("OTHER", other);
    let mut ground = Ground::default();
    let words: Vec<u32> = (0..2 * 64 * 4).collect();
    let (x, y) = (ground.upload(&words), ground.allocate(64 * 4));
    let code = library(&source);
    let mut last = Err(String::new());
    for seed in 0..20 {
        let shot = shot(&code, "copies", 1, 64, &[x, y]).seed(seed);
        let this = match shot.run(&ground) {
            Ok(_) => Ok(ground.download::<u32>(y, 64)),
            Err(failure) => {
                assert_eq!(failure.code, FAILED, "{}", failure.message);
                Err(failure.message)
            }
        };
        assert!(seed == 0 || this.is_ok() == Result::is_ok(&last), "{seed}");
        last = this;
    }
    last
}

fn expected(used: u32, other: u32) -> Vec<u32> {
    let word = |t: u32| if t == 5 { 0 } else { used * 256 + t * 4 + 3 };
    (0..64).map(|t| word(t ^ other)).collect()
}

const ALL: &str = r#"asm volatile("cp.async.wait_group 0;" ::: "memory");"#;
const ALL_BUT_ONE: &str = r#"asm volatile("cp.async.wait_group 1;" ::: "memory");"#;

#[test]
fn copies_arrive_with_the_wait_for_their_group() {
    assert_eq!(run(ALL, "", "1", "0"), Ok(expected(1, 0)));
    assert_eq!(run(ALL, "__syncthreads();", "1", "9"), Ok(expected(1, 9)));
    assert_eq!(run(ALL_BUT_ONE, "", "0", "0"), Ok(expected(0, 0)));
}

#[test]
fn what_is_in_flight_must_not_be_touched() {
    for (waited, used) in [("", "0"), (ALL_BUT_ONE, "1")] {
        let message = run(waited, "__syncthreads();", used, "9").unwrap_err();
        assert!(
            message.contains("read 4 bytes") && message.contains("a copy by cp.async is in flight"),
            "{message}"
        );
    }
    let write = "tile[1][t].at[0] = 1;";
    let message = run("", write, "0", "0").unwrap_err();
    assert!(message.contains("wrote 4 bytes"), "{message}");
    let again = r#"asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned int)__cvta_generic_to_shared(&tile[1][t])), "l"(x), "r"(16) : "memory");"#;
    let message = run("", again, "0", "0").unwrap_err();
    assert!(message.contains("wrote 16 bytes"), "{message}");
}

#[test]
fn other_threads_see_copies_after_a_barrier() {
    let message = run(ALL, "", "1", "9").unwrap_err();
    assert!(message.contains("no barrier is between them"), "{message}");
}

#[test]
fn a_copy_that_is_not_in_a_group_is_not_waited_for() {
    let source = SOURCE
        .replacen(
            r#"asm volatile("cp.async.commit_group;" ::: "memory");"#,
            "",
            1,
        )
        .replace("WAITED", ALL)
        .replace("BETWEEN", "")
        .replace("USED", "0")
        .replace("OTHER", "0");
    let mut ground = Ground::default();
    let (x, y) = (ground.upload(&[0_u32; 512]), ground.allocate(256));
    let shot = shot(&library(&source), "copies", 1, 64, &[x, y]);
    let message = shot.expect_failure(&ground, FAILED);
    assert!(message.contains("has not waited"), "{message}");
}

#[test]
fn a_warp_loads_four_matrices_and_their_transposes() {
    let source = r#"
extern "C" __global__ void matrices(const unsigned short* x, unsigned int* y, unsigned int* turned) {
  // Rows are 24 elements apart.
  __shared__ __align__(16) unsigned short tile[16][24];
  unsigned int lane = threadIdx.x;
  for (unsigned int i = lane; i < 256; i += 32) tile[i / 16][i % 16] = x[i];
  __syncwarp();
  unsigned int row = (unsigned int)__cvta_generic_to_shared(&tile[lane % 16][lane / 16 * 8]);
  unsigned int to[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
  for (unsigned int i = 0; i < 4; i++) y[lane * 4 + i] = to[i];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
  for (unsigned int i = 0; i < 4; i++) turned[lane * 4 + i] = to[i];
}"#;
    let mut ground = Ground::default();
    let elements: Vec<u16> = (0..256).map(|i| i * 37).collect();
    let x = ground.upload(&elements);
    let (y, turned) = (ground.upload(&[0_u32; 128]), ground.upload(&[0_u32; 128]));
    shot(&library(source), "matrices", 1, 32, &[x, y, turned]).expect(&ground);
    let (y, turned) = (
        ground.download::<u32>(y, 128),
        ground.download::<u32>(turned, 128),
    );
    for index in 0..128 {
        let (lane, matrix) = (index / 4, index % 4);
        let (group, pair) = (lane / 4, lane % 4 * 2);
        let at = |row: usize, column: usize| {
            u32::from(elements[(row + matrix % 2 * 8) * 16 + column + matrix / 2 * 8])
        };
        assert_eq!(y[index], at(group, pair) | at(group, pair + 1) << 16);
        assert_eq!(turned[index], at(pair, group) | at(pair + 1, group) << 16);
    }
}
