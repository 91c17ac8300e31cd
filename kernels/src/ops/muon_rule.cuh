// Muon's direction of one element, in the place of its gradient: see update.rs.
{
    let beta = of.constants[0];
    momentum = fused(of.constants[1], grad - momentum, momentum);
    let ahead = fused(beta, momentum - grad, grad);
    direction = select(of.constants[2] != number(0.0), ahead, momentum);
}
